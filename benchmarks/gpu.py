"""Runs this project's GPU measurements within a time budget and writes them as a table.

Rows are grouped, most valuable group first. The contenders in a group compile and warm up together in separate
processes and are then timed one by one (`contenders`). A group is skipped if it would exceed the remaining time.
Results are written after every row, so a killed run loses no rows.

OUT contains results.json, table.md, and log.txt with the contenders' output.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.contenders import Work, take_turns
from cqwen_dist.config import UserError
from cqwen_dist.run.files import write_atomically

NEEDED = ("torch", "triton", "transformers", "peft", "pydantic", "deepspeed", "datasets")
WHEELS = "python -m pip install --no-index --no-deps --target SITE WHEELS/*.whl, then PYTHONPATH=SITE"


class Group(NamedTuple):
    """Contenders that warm up together, with time limits in seconds. estimate_s: the expected total on one H200."""

    name: str
    works: dict[str, Work]
    estimate_s: float
    warm_s: float
    timed_s: float = 20.0

    def limits(self, rehearsed: bool) -> tuple[float, float]:
        """(warm_s, timed_s); four times as long if rehearsed, as all contenders share a slow machine's cores."""
        patience = 4 if rehearsed else 1
        return patience * self.warm_s, patience * self.timed_s


def part_one(rehearsed: bool) -> Iterator[Group]:
    """The groups for the device, the loss and the training step."""
    from benchmarks import gpu_works as works

    size = works.TOY if rehearsed else works.GPU
    yield Group("machine", {"machine": works.machine(size)}, 20, 60)
    names = ("floor", "triton", "chunked", "liger", "cce", "torch")
    for hidden in size.hiddens:
        found = {name: works.loss(name, size, hidden) for name in names}
        yield Group(f"loss, H={hidden}", found, 60, 90)
    tokens = size.tokens * 6 // 7 - 20  # not a power of two, like the number of label positions in a batch
    odd = {name: works.loss(name, size, size.hiddens[0], tokens) for name in ("floor", "triton")}
    yield Group(f"loss, H={size.hiddens[0]}, {tokens:,} tokens", odd, 25, 60)
    half = "qwen2.5-0.5b"
    plain = {"model.compile_layers": False}
    steps = {
        "ours, compiled": works.ours(half, size),
        "ours": works.ours(half, size, **plain),
        "HF + PEFT, compiled": works.peer(half, size, liger=False),
        "HF + PEFT": works.peer(half, size, liger=False, **plain),
        "HF + PEFT + Liger": works.peer(half, size, liger=True, **plain),
    }
    yield Group("step, 0.5B, 8 x 1024", steps, 110, 110)
    ways = {
        "as a whole": works.ours(half, size, whole=True),
        "CUDA graphs": works.ours(half, size, graphs=True),
        "as a whole, CUDA graphs": works.ours(half, size, whole=True, graphs=True),
    }
    yield Group("step, 0.5B, ways to compile", ways, 150, 180)
    rows: dict[str, Any] = {"train.micro_batch_size": 4, "train.global_batch_size": 4}
    seven = works.ours("qwen2.5-7b", size, **rows)
    yield Group("step, 7B, compiled, 4 x 1024", {"ours": seven}, 45, 70)


def part_two(rehearsed: bool, out: Path) -> Iterator[Group]:
    """The groups for decoding, packing and memory."""
    from benchmarks import gpu_works as works
    from benchmarks.generate import THEIRS
    from benchmarks.packed import MASK, PADDED, VARLEN

    size = works.TOY if rehearsed else works.GPU
    names = (THEIRS, "standard", "compatible", "ovr")
    static = {
        f"{name}, batch {batch}": works.decoding(name, size, batch, "static")
        for batch in size.batches
        for name in names
    }
    yield Group("decoding, static cache", static, 120, 150)
    packed = {kind: works.packing(kind, size, out) for kind in (PADDED, MASK, VARLEN)}
    yield Group("packing, 0.5B", packed, 40, 60)
    for case in ("0.5B, 8 x 1024", "0.5B, packed without a mask", "0.5B, ZeRO-2", "7B, 2 x 1024"):
        yield Group(f"memory, {case}", {"planned over measured": works.memory(case)}, 25, 40, 60)
    dynamic = {name: works.decoding(name, size, size.batches[0], "dynamic") for name in names}
    yield Group(f"decoding, batch {size.batches[0]}, dynamic cache", dynamic, 40, 60)


class Results:
    """The rows so far, written to files after each row."""

    def __init__(self, out: Path, command: str) -> None:
        self.out, self.command = out, command
        self.rows: list[dict[str, Any]] = []

    def add(self, group: str, name: str, result: Any, failed: str) -> None:
        """Adds a contender's result, or the reason of the failure."""
        self.rows.append({"group": group, "name": name, "result": result, "failed": failed})
        write_atomically(self.out / "results.json", json.dumps({"command": self.command, "rows": self.rows}, indent=1))
        write_atomically(self.out / "table.md", self.table())

    def refuse_failures(self) -> None:
        """Raises `UserError` if a row failed; peers may be missing."""
        failed = [row["name"] for row in self.rows if row["failed"] and "No module named" not in row["failed"]]
        if failed:
            raise UserError("benchmarks gpu --rehearse", ", ".join(failed), f"rows that work ({self.out / 'log.txt'})")

    def table(self) -> str:
        """All rows as Markdown."""
        lines = [f"`{self.command}`, {date.today().isoformat()}.", "", "| | | measured |", "|---|---|---|"]
        for row in self.rows:
            measured = row["failed"] or said(row["result"])
            lines.append(f"| {row['group']} | {row['name']} | {measured} |")
        return "\n".join(lines) + "\n"


def said(result: Any) -> str:
    """A result as text for one table cell: numbers by name."""
    if isinstance(result, list):
        return _packing(result)
    return "; ".join(cell for key, value in result.items() if (cell := _cell(key, value)))


def _cell(key: str, value: Any) -> str:
    """A number, a text, the largest error, the median step, or the parts of a step; "" for other values."""
    if isinstance(value, dict):
        if key in ("kernels_ms", "parts_s"):
            return f"{key} " + ", ".join(f"{name} {part:.4g}" for name, part in value.items())
        if key == "errors" and value:
            return f"errors at most {max(value.values()):.1e}"
        return f"{key} {value['median']:.4f}" if key == "step_s" else ""
    if isinstance(value, float):
        return f"{key} {value:,.4g}" if abs(value) < 1000 else f"{key} {value:,.0f}"
    return f"{key} {value}" if isinstance(value, str) and key != "name" else ""


def _packing(steps: list[dict[str, Any]]) -> str:
    """Real tokens/s for the median step and for the backbone part."""
    tokens, positions = steps[0]["tokens"], steps[0]["positions"]
    whole = median(sum(step["seconds"].values()) for step in steps)
    backbone = median(
        sum(seconds for part, seconds in step["seconds"].items() if part.startswith("backbone")) for step in steps
    )
    return f"{tokens / whole:,.0f} tokens/s, backbone {tokens / backbone:,.0f}, filled {tokens / positions:.1%}"


def run(out: Path, budget_s: float, parts: tuple[int, ...] = (1, 2), rehearse: bool = False, only: str = "") -> str:
    """Runs the groups that fit into budget_s seconds and returns the table. only: a substring of the group names.

    rehearse: run at toy size on a CPU, with kernels in Triton's interpreter. Raises `UserError` if no GPU is found, a
    package is missing or a rehearsed row fails.
    """
    began = time.monotonic()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # do not initialise CUDA before the forks
    if rehearse:
        budget_s = math.inf
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu"}
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UserError("benchmarks gpu", f"no {', '.join(missing)}", f"these packages; carried as wheels: {WHEELS}")
    import torch

    if not rehearse and not torch.cuda.is_available():
        raise UserError("benchmarks gpu", "no CUDA device", "a GPU, or --rehearse for the same at toy size on a CPU")
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if rehearse else "cuda")
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out, "python -m benchmarks gpu " + ("--rehearse" if rehearse else f"--budget {budget_s:g}"))
    left: Callable[[], float] = lambda: budget_s - (time.monotonic() - began)  # noqa: E731
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for group in _groups(parts, rehearse, out):
            if only and only not in group.name:
                continue
            if group.estimate_s > left():
                results.add(group.name, "all", None, f"skipped: takes {group.estimate_s:.0f} s, {left():.0f} s left")
                continue
            begun = time.monotonic()
            for row in take_turns(group.works, out / "log.txt", *group.limits(rehearse), left):
                results.add(group.name, *row)
            print(f"{group.name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    finally:
        signal.signal(signal.SIGTERM, previous)
        print(results.table(), flush=True)
    if rehearse:
        results.refuse_failures()
    return results.table()


def _groups(parts: tuple[int, ...], rehearse: bool, out: Path) -> Iterator[Group]:
    if 1 in parts:
        yield from part_one(rehearse)
    if 2 in parts:
        yield from part_two(rehearse, out)
