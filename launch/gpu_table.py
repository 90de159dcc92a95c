"""`make gpu-table`: what this project measures on one GPU, in one go, as one table beside what was asked for.

    python launch/gpu_table.py [--out runs/gpu-table] [--packed CONFIG KEY=VALUE ...]

OUT/NAME.json holds what each command printed, OUT/table.md the table. The same command goes on where it stopped, and
measures again what failed. --packed: a config with real texts, to measure packing on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

LOSS = "bench loss --tokens 8192 --dtype bf16 --device cuda --rounds 7"
STEP = "data.pack=false train.global_batch_size=8 train.micro_batch_size=8"
Rows = Iterator[tuple[str, str, str]]  # what, measured, asked for


class Measure(NamedTuple):
    """A command of `cqwen` that prints JSON, and the rows that it fills."""

    command: list[str]
    rows: Callable[[dict[str, Any]], Rows]


def loss(most_ms: float, most_fp8_ms: float) -> Callable[[dict[str, Any]], Rows]:
    """Rows of `cqwen bench loss`. most_ms: asked of the fused kernel, in bf16 and with fp8 for the scale's product."""
    bf16, fp8 = f"at most {most_ms:g} ms, 400 MiB", f"at most {most_fp8_ms:g} ms"
    asked = {"fused": bf16, "fused two": bf16, "fused fp8": fp8, "fused two fp8": fp8}

    def rows(found: dict[str, Any]) -> Rows:
        for row in found["rows"]:
            extra = "" if row["extra_mib"] is None else f", {row['extra_mib']:,.0f} MiB"
            what = f"loss, H={found['hidden']}, {row['name']}"
            yield what, f"{1000 * row['seconds']['median']:.1f} ms{extra}", asked.get(row["name"], "")

    return rows


def step(what: str, asked: dict[str, str]) -> Callable[[dict[str, Any]], Rows]:
    """Rows of `cqwen bench step`. asked: by the name of a row."""

    def rows(found: dict[str, Any]) -> Rows:
        for row in found["rows"]:
            name = row["name"]
            if "skipped" in row:
                yield f"{what}, {name}", f"skipped: {row['skipped']}", asked.get(name, "")
                continue
            ratio = f"; {row['ratio']['against']}: {row['ratio']['measured']:.2f}" if "ratio" in row else ""
            mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.0%}"
            measured = f"{1000 * row['step_s']['median']:.1f} ms, {row['tokens_per_s']:,.0f} tokens/s{mfu}{ratio}"
            yield f"{what}, {name}", measured, asked.get(name, "")

    return rows


def memory(found: dict[str, Any]) -> Rows:
    """Rows of `cqwen bench memory`."""
    for row in found["rows"]:
        measured = f"{row['measured_mib'] / 1024:.2f} GiB, planned over it {row['ratio']:.3f}"
        yield f"memory, {row['name']} ({found['device']})", measured, "0.95 to 1.05"


def packed(found: dict[str, Any]) -> Rows:
    """Rows of `cqwen bench packed`."""
    for row in found["rows"]:
        measured = f"{row['tokens_per_s']:,.0f} real tokens/s, {row['of_prediction']:.2f} of what padding predicts"
        yield f"packing, {row['name']}", measured, "at least 0.95" if "varlen" in row["name"] else ""


def decoding(found: dict[str, Any]) -> Rows:
    """Rows of `cqwen bench generate`."""
    for row in found["results"]:
        what = f"decoding, batch {row['batch']}, {row['cache']}, {row['contender']}"
        asked = "at least 0.95" if (row["contender"], row["cache"]) == ("standard", "static") else ""
        yield what, f"{row['tokens_per_s']:,.0f} tokens/s, {row['ratio']:.2f} of Hugging Face's", asked


PEER = {"hf+peft": "ours at least 1.0", "hf+peft, compiled": "ours at least 1.0", "hf+peft+liger": "ours at least 1.3"}
MEASURES = {
    "loss-896": Measure(f"{LOSS} --hidden 896".split(), loss(22, 17.5)),
    "loss-3584": Measure(f"{LOSS} --hidden 3584".split(), loss(75, 60)),
    "step-0.5b": Measure(f"bench step configs/qwen2.5-0.5b.yaml {STEP} --both".split(), step("0.5B", PEER)),
    "step-7b": Measure(
        f"bench step configs/qwen2.5-7b.yaml {STEP} --no-peers".split(), step("7B", {"lora": "MFU at least 55 %"})
    ),
    "memory": Measure(["bench", "memory"], memory),
    "memory-64": Measure(["bench", "memory", "--world", "64"], memory),
    "decoding": Measure(["bench", "generate"], decoding),
}


def measured(name: str, command: list[str], out: Path) -> dict[str, Any] | str:
    """What `cqwen COMMAND --json` printed, now or before; a line that says why there is nothing."""
    done = out / f"{name}.json"
    if not done.is_file():
        print(f"{name}: cqwen {' '.join(command)}", flush=True)
        start = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", "cqwen_dist", *command, "--json"], stdout=subprocess.PIPE, text=True
        )
        print(f"{name}: exit {ended.returncode} after {time.monotonic() - start:.0f} s", flush=True)
        if ended.returncode:
            return f"failed with exit code {ended.returncode}; its error is above"
        done.write_text(ended.stdout, encoding="utf-8")
    found: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-table"))
    parser.add_argument("--packed", nargs="+", metavar="CONFIG", help="a config with real texts, and its overrides")
    parser.add_argument("--only", nargs="+", choices=[*MEASURES, "packing"], help="these measures alone")
    ask = parser.parse_args()
    measures = dict(MEASURES)
    if ask.packed:
        measures["packing"] = Measure(["bench", "packed", *ask.packed], packed)
    ask.out.mkdir(parents=True, exist_ok=True)
    lines = [f"Measured {date.today().isoformat()}.", "", "| | measured | asked for |", "|---|---|---|"]
    for name, measure in measures.items():
        if ask.only and name not in ask.only:
            continue
        found = measured(name, measure.command, ask.out)
        rows = [(name, found, "")] if isinstance(found, str) else measure.rows(found)
        lines += [f"| {' | '.join(row)} |" for row in rows]
        (ask.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
