"""Runs in one job, compared with the same runs one after the other: `python -m benchmarks together`."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from rich.table import Table

RUNS = [*product((3e-5, 1e-4, 3e-4, 1e-3), ("standardise", "signed_log"))]  # rate, unit of numbers; each its seed
HELD_OUT = 8  # texts


def run(
    base: str, data: Path, runs: int, alone: int, texts: int, steps: int, lora: bool, overrides: Sequence[str]
) -> dict[str, Any]:
    """Seconds with the start of each process, its CPU seconds, and the largest process, of both. alone: so many runs
    are taken one after the other, and their seconds multiplied."""
    found: dict[str, Any] = {"runs": runs, "load before": os.getloadavg()[0]}
    with TemporaryDirectory() as place:
        folder = Path(place)
        lines = data.read_text(encoding="utf-8").splitlines(keepends=True)[: texts + HELD_OUT]
        for name, own in {"eval": lines[:HELD_OUT], "train": lines[HELD_OUT:]}.items():
            (folder / f"{name}.jsonl").write_text("".join(own), encoding="utf-8")
        # One after the other first: the kernel only tells the largest process so far
        for name, count in {"one after the other": alone, "one job": runs}.items():
            files = [_config(folder, name, base, steps, i, lora) for i in range(count)]
            times = runs / alone if name == "one after the other" else 1.0
            began, before = time.monotonic(), _of_children()
            for given in [files] if name == "one job" else [[file] for file in files]:
                words = [*map(str, given), *overrides]
                subprocess.run([sys.executable, "-m", "cqwen_dist", "train", *words], check=True, stdout=sys.stderr)
            found[f"{name}, s"] = round(times * (time.monotonic() - began), 1)
            after = _of_children()
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            found[f"{name}, CPU s"] = round(times * cpu, 1)
            found[f"{name}, GiB"] = round(after.ru_maxrss / 2**20, 2)
    for unit in ("s", "CPU s"):
        found[f"ratio of {unit}"] = round(found[f"one job, {unit}"] / found[f"one after the other, {unit}"], 3)
    return found


def _of_children() -> resource.struct_rusage:
    return resource.getrusage(resource.RUSAGE_CHILDREN)


def _config(folder: Path, name: str, base: str, steps: int, i: int, lora: bool) -> Path:
    (rate, unit), size = RUNS[i], 2 if lora else 4
    trained = ["heads", "lora"] if lora else ["heads"]
    data = {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "sequence_length": 256}
    tree = {
        "model": {"name_or_path": str(Path(base).absolute())},
        "data": {**data, "text_template": "{question}\n{answer}"},
        "loss": {"target_transform": unit},
        "stages": [{"name": "only", "train": trained, "steps": steps, "lr": rate}],
        "train": {"global_batch_size": size, "micro_batch_size": size, "eval_every": steps, "checkpoint_every": steps}
        | {"seed": i},
        "run": {"dir": str(folder / name / str(i))},
    }
    path = folder / f"{name}-{i}.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def table(found: dict[str, Any]) -> Table:
    """The result as a table."""
    shown = Table("", "")
    for name, value in found.items():
        shown.add_row(name, str(value))
    return shown
