"""``cqwen bench learn``: do words and numbers get better, and what else is kept, beside ordinary LoRA on the same base?

Arms (`arms`) are at equal texts. Words are the same for every arm (`words`); the base reads the text as it is, digits
and all. Every arm is shown at the rate of LoRA that leaves the least word perplexity on the held-out texts; the rates
are chosen on the texts that are reported, for all arms alike. Every training is one task; results lie in OUT/results
as they end, and the same command goes on with what is missing.
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
from rich.table import Table

from cqwen_dist.bench.learn.answers import numbers_to_tell
from cqwen_dist.bench.learn.arms import BASE, OURS, PLAIN, SCALES, tasks
from cqwen_dist.bench.learn.corpora import HELD_OUT, read_items, write_corpora
from cqwen_dist.bench.learn.lanes import run_tasks
from cqwen_dist.bench.learn.ours import our_arm
from cqwen_dist.bench.learn.plain import plain_arm
from cqwen_dist.config import NumberPolicy, UserError
from cqwen_dist.run.files import write_atomically

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
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train and measure what is missing; returns the summary, JSON-ready.

    base: a folder. data: JSONL of GSM8K's fields or of `text`. lanes: trainings side by side (default: a core each, at
    most 4 on a GPU). only: arms whose names match one of these regular expressions. Raises `UserError`.
    """
    if scale not in SCALES:
        raise UserError("--scale", scale, " or ".join(SCALES))
    size, began = SCALES[scale], time.monotonic()
    counts = write_corpora(out / "data", data, size.texts, size.held_out, size.problems, size.pieces)
    every = tasks(out, size, base, _median_number(out / "data" / "train.jsonl"))
    wanted = [task for task in every if not only or any(re.search(pattern, task.name) for pattern in only)]
    say(f"{len(wanted)} trainings; texts: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    lanes = lanes or min(4 if torch.cuda.is_available() else 12, len(os.sched_getaffinity(0)))
    results = run_tasks(wanted, KINDS, out, lanes, minutes * 60 - (time.monotonic() - began), say)
    good = {name: result for name, result in results.items() if "error" not in result}
    summary = {
        "scale": scale,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
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
    """The base, then a row an arm: that of the rate with the least word perplexity on the held-out texts."""
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
    """The summary for a terminal: top-1 and perplexity of the words of every kind of text, F1, the answers' numbers."""
    title = f"Each arm at its best rate (least word perplexity); {summary['device']}"
    out = Table(title=title, title_justify="left")
    columns = ["arm", "LoRA lr", "words", "perplexity", "prose", "perplexity", "code", "perplexity"]
    for column in (*columns, "F1", "MdAE", "CRPS", "median's MdAE", "and CRPS", "s"):
        out.add_column(column, justify="left" if column == "arm" else "right")
    for row in summary["arms"]:
        cells = []
        for name in HELD_OUT:
            cells += [f"{row['words'][name]['top1']:.1%}", f"{row['words'][name]['perplexity']:.4g}"]
        numbers = row.get("numbers", {})
        metrics = [row["words"]["words"].get("num_f1")]
        metrics += [numbers.get(key) for key in ("mdae", "crps", "median_mdae", "median_mae")]
        cells += ["" if value is None else f"{value:.4g}" for value in metrics]
        out.add_row(row["arm"], row["lr"], *cells, f"{row['seconds']:.0f}")
    return out


def _median_number(path: Path) -> float:
    """The median of the numbers behind the prompts of the training texts."""
    values = [value for _, _, value, _ in numbers_to_tell(read_items(path), NumberPolicy())]
    return statistics.median(values) if values else 0.0
