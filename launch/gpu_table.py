"""`make gpu-table`: what this project measures on one GPU, in one go, as one table beside what was asked for.

    python launch/gpu_table.py [--out runs/gpu-table] [--only NAME ...]

OUT/NAME.json holds what each command printed, OUT/table.md the table. The same command goes on where it stopped, and
measures again what failed. Nothing is downloaded: packing is measured on this project's own pages.
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
    """A command of `cqwen` that prints JSON, and the rows that it fills. OUT in it is the folder of the results."""

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
        for name, why in found["skipped"].items():
            yield f"loss, H={found['hidden']}, {name}", f"skipped: {why}", asked.get(name, "")

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
        if "skipped" in row:
            yield f"memory, {row['name']} ({found['device']})", f"skipped: {row['skipped']}", "0.95 to 1.05"
            continue
        measured = f"{row['measured_mib'] / 1024:.2f} GiB, planned over it {row['ratio']:.3f}"
        yield f"memory, {row['name']} ({found['device']})", measured, "0.95 to 1.05"


def packed(found: dict[str, Any]) -> Rows:
    """Rows of `cqwen bench packed`."""
    for row in found["rows"]:
        measured = f"{row['tokens_per_s']:,.0f} real tokens/s, {row['of_prediction']:.2f} of what padding predicts"
        yield f"packing, {row['name']}", measured, "at least 0.95" if "varlen" in row["name"] else ""


def pages(out: Path) -> Path:
    """OUT/pages.jsonl: the paragraphs of the README and docs/, real texts of very different lengths."""
    root = Path(__file__).parents[1]
    found = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    texts = [text for page in found for text in page.read_text(encoding="utf-8").split("\n\n") if text.strip()]
    path = out / "pages.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def curves(out: Path) -> Rows:
    """Rows of 500 steps of the quickstart in bf16: as it is, with another kernel's rounding, with fp8 scores.

    Means of the words' loss over a hundred steps each. A training that was done before is not run again.
    """
    kinds = {"fused": [], "triton, other rounding": ["loss.impl=triton"], "fused fp8": ["loss.scale_dtype=fp8"]}
    for name, changes in kinds.items():
        run = out / f"curve-{name.replace(', ', '-').replace(' ', '-')}"
        shared = ["loss.impl=fused", "train.precision=bf16", "stages.1.steps=350", "train.eval_every=500"]
        command = ["train", "configs/quickstart.yaml", f"run.dir={run}", *shared, *changes]
        code = subprocess.run([sys.executable, "-m", "cqwen_dist", *command], stdout=subprocess.DEVNULL).returncode
        if code:
            yield f"500 steps, {name}", f"failed with exit code {code}; its error is above", ""
            continue
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses = [json.loads(line)["train/cls_loss_mean"] for line in lines]
        means = [f"{sum(losses[i : i + 100]) / 100:.4f}" for i in range(0, 500, 100)]
        yield f"500 steps, {name}", ", ".join(means), "fp8 no further from fused than triton is"


def tests(out: Path) -> Rows:
    """The row of `pytest -m gpu`."""
    start, kept = time.monotonic(), out / "tests.txt"
    if not kept.is_file():
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu"], stdout=subprocess.PIPE, text=True)
        print(done.stdout, f"tests: exit {done.returncode} after {time.monotonic() - start:.0f} s", flush=True)
        last = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
        if done.returncode:
            yield "tests that need a GPU", last, "all pass"
            return
        kept.write_text(last, encoding="utf-8")
    yield "tests that need a GPU", kept.read_text(encoding="utf-8"), "all pass"


def decoding(found: dict[str, Any]) -> Rows:
    """Rows of `cqwen bench generate`."""
    for row in found["results"]:
        what = f"decoding, batch {row['batch']}, {row['cache']}, {row['contender']}"
        asked = "at least 0.95" if (row["contender"], row["cache"]) == ("standard", "static") else ""
        if "skipped" in row:
            yield what, f"skipped: {row['skipped']}", asked
            continue
        ratio = f", {row['ratio']:.2f} of Hugging Face's" if "ratio" in row else ""
        yield what, f"{row['tokens_per_s']:,.0f} tokens/s{ratio}", asked


# The backbone of 0.5B on texts that this folder has
PACKED = [
    *("configs/gsm8k.yaml", "data.train=OUT/pages.jsonl", "data.text_template=null", "data.text_field=text"),
    *("data.calculator_marks=keep", "data.on_nonfinite=skip", "data.sequence_length=1024", "model.tokenizer=train"),
    *(f"model.architecture.{key}" for key in ("hidden_size=896", "intermediate_size=4864", "num_hidden_layers=24")),
    *("model.architecture.num_attention_heads=14", "train.precision=bf16"),
    *("train.global_batch_size=8", "train.micro_batch_size=8"),
]
PEER = {"hf+peft": "ours at least 1.0", "hf+peft, compiled": "ours at least 1.0", "hf+peft+liger": "ours at least 1.3"}
MEASURES = {
    "loss-896": Measure(f"{LOSS} --hidden 896".split(), loss(22, 17.5)),
    "loss-3584": Measure(f"{LOSS} --hidden 3584".split(), loss(75, 60)),
    "step-0.5b": Measure(f"bench step configs/qwen2.5-0.5b.yaml {STEP} --both".split(), step("0.5B", PEER)),
    "step-7b": Measure(
        f"bench step configs/qwen2.5-7b.yaml {STEP} parallel.vocab_group_size=1 --no-peers".split(),
        step("7B", {"lora": "MFU at least 55 %"}),
    ),
    "memory": Measure(["bench", "memory"], memory),
    "memory-64": Measure(["bench", "memory", "--world", "64"], memory),
    **{  # one command a batch and cache: each compiles every mode, which takes minutes
        f"decoding-{batch}-{cache}": Measure(f"bench generate --batch {batch} --cache {cache}".split(), decoding)
        for batch in (1, 8, 64)
        for cache in ("static", "dynamic")
    },
    "packing": Measure(["bench", "packed", *PACKED], packed),
}
OTHERS: dict[str, Callable[[Path], Rows]] = {"curves": curves, "tests": tests}


def measured(name: str, command: list[str], out: Path) -> dict[str, Any] | str:
    """What `cqwen COMMAND --json` printed, now or before; a line that says why there is nothing."""
    done = out / f"{name}.json"
    if not done.is_file():
        print(f"{name}: cqwen {' '.join(command)}", flush=True)
        start = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", "cqwen_dist", *(word.replace("OUT", str(out)) for word in command), "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        print(f"{name}: exit {ended.returncode} after {time.monotonic() - start:.0f} s", flush=True)
        if ended.returncode:
            return f"failed with exit code {ended.returncode}; its error is above"
        try:
            json.loads(ended.stdout)
        except ValueError:  # kept, it would never be measured again
            return "printed something else than JSON"
        done.write_text(ended.stdout, encoding="utf-8")
    found: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-table"))
    parser.add_argument("--only", nargs="+", choices=[*OTHERS, *MEASURES], help="these measures alone")
    ask = parser.parse_args()
    ask.out.mkdir(parents=True, exist_ok=True)
    pages(ask.out)
    lines = [f"Measured {date.today().isoformat()}.", "", "| | measured | asked for |", "|---|---|---|"]
    for name in ask.only or (*MEASURES, *OTHERS):  # figures first: a GPU may be at hand for minutes only
        if name in OTHERS:
            rows = OTHERS[name](ask.out)
        else:
            measure = MEASURES[name]
            found = measured(name, measure.command, ask.out)
            rows = iter([(name, found, "")]) if isinstance(found, str) else measure.rows(found)
        for row in rows:
            lines.append(f"| {' | '.join(row)} |")
            (ask.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
