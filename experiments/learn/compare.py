"""Does CausalQwen learn words and numbers as well as ordinary LoRA on the same base, and what does each forget?

All arms (`arms`) train on the same texts and are measured on the same words (`words`); the untrained base reads numbers
as digits. The table shows each arm at the LoRA rate with the lowest word perplexity on the held-out texts, so rates are
chosen on the texts that are reported, for all arms alike. Each training is one task: its result is written to
OUT/results when it ends, and the same command continues with the missing ones.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cqwen_dist.config import NumberPolicy, UserError
from cqwen_dist.parallel.runtime import pick_device
from cqwen_dist.run.files import write_atomically
from experiments.learn.answers import numbers_after_prompts
from experiments.learn.arms import BASE, OURS, PLAIN, SCALES, hidden_size, tasks
from experiments.learn.corpora import HELD_OUT, read_items, write_corpora
from experiments.learn.lanes import run_tasks
from experiments.learn.ours import our_arm
from experiments.learn.plain import plain_arm

KINDS = {"ours": our_arm, "plain": plain_arm}


def run(
    base: str,
    data: str,
    *,
    out: Path,
    scale: str = "small",
    lanes: int | None = None,
    minutes: float = 60.0,
    only: list[str] | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run the missing trainings and measure them; returns the summary, JSON-ready.

    base: a folder. data: JSONL of GSM8K's fields or of `text`. lanes: trainings side by side (default: one per core,
    at most 4 on a GPU). seed: of every arm. only: arms whose names match one of these regular expressions. Raises
    `UserError`.
    """
    if scale not in SCALES:
        raise UserError("--scale", scale, " or ".join(SCALES))
    size, began = SCALES[scale], time.monotonic()
    counts = write_corpora(out / "data", data, size.texts, size.held_out, size.problems, size.pieces)
    gpu = pick_device(0).type == "cuda"
    median = _median_number(out / "data" / "train.jsonl")
    every = tasks(out, size, base, hidden_size(base), median, bf16=gpu, seed=seed)
    wanted = [task for task in every if not only or any(re.search(pattern, task.name) for pattern in only)]
    say(f"{len(wanted)} trainings; texts: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    lanes = lanes or min(4 if gpu else 12, len(os.sched_getaffinity(0)))
    results = run_tasks(wanted, KINDS, out, lanes, minutes * 60 - (time.monotonic() - began), say)
    good = {name: result for name, result in results.items() if "error" not in result}
    summary = {
        "scale": scale,
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "torch": torch.__version__,
        "texts": counts,
        "seconds": time.monotonic() - began,
        "failed": sorted(set(results) - set(good)),
        "missing": sorted({task.name for task in wanted} - set(results)),
        "arms": rows(good),
    }
    write_atomically(out / "summary.json", json.dumps(summary, indent=1))
    return summary


def rows(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The base, then one row per arm at the rate with the lowest word perplexity on the held-out texts."""
    found: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for name, result in results.items():
        if name != BASE:
            arm, lr = name.rsplit(" ", 1)
            found[arm][lr] = result
    out = [{"arm": BASE, "lr": "", **results[BASE]}] if BASE in results else []
    for arm in (*OURS, *PLAIN):
        if rates := found.get(arm):
            best = min(rates, key=lambda lr: rates[lr]["words"]["words"]["perplexity"])
            out.append({"arm": arm, "lr": best, **rates[best], "rates": rates})
    return out


def table(summary: dict[str, Any]) -> Table:
    """The summary for a terminal: top-1 and perplexity of words by kind of text, F1 of <NUM>, errors of numbers."""
    title = f"Each arm at its best rate (least word perplexity); {summary['device']}"
    out = Table("arm", title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    for name in ("words", "prose", "code", "F1", "numbers"):
        out.add_column(name, justify="right")
    for row in summary["arms"]:
        cells = [f"{row['words'][name]['top1']:.1%}, {row['words'][name]['perplexity']:.3g}" for name in HELD_OUT]
        f1 = row["words"]["words"].get("num_f1")
        cells += ["" if f1 is None else f"{f1:.3f}"]
        if numbers := row.get("numbers"):
            cells += [f"{numbers['mdae']:.3g}, {numbers['crps']:.3g}"]
            always = f"{numbers['median_mdae']:.3g}, {numbers['median_mae']:.3g}"
            out.caption = f"Top-1, perplexity; median error, CRPS (always the median: {always})"
        out.add_row(f"{row['arm']} {row['lr']}", *cells)
    return out


def _median_number(path: Path) -> float:
    """The median of the numbers after the prompts of the training texts."""
    values = [value for _, _, value, _ in numbers_after_prompts(read_items(path), NumberPolicy())]
    return statistics.median(values) if values else 0.0
