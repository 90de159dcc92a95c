"""``cqwen bench learn``: does it learn, does it keep what it knew, and does it beat the ordinary way?

preserve    top-1 before and after every stage, on what is trained on and on a corpus of another kind, for the
            calibrated start, the seeds' presets, the KL bound, and ordinary LoRA with softmax
starts      every start at its best rate, over several seeds and bases: words and numbers together
numbers     error and intervals of held-out numbers, beside always the median, ridge regression, and digits
real        the same questions to a real base of the user's, beside ordinary LoRA (`bench.learn_real`)

Other bases are pretrained here by cross-entropy on two real corpora (`bench.learn_data`). Every arm is one task;
results lie in OUT/results as they end, and the same command goes on with what is missing.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from cqwen_dist.bench.learn_causal import build_base, causal_arm
from cqwen_dist.bench.learn_data import read_items, ridge_error, tables, write_corpora
from cqwen_dist.bench.learn_lanes import run_tasks
from cqwen_dist.bench.learn_plain import plain_arm
from cqwen_dist.bench.learn_plan import EXPERIMENTS, SCALES, STARTS, Planner, with_seeds
from cqwen_dist.bench.learn_real import real_rows, real_table, write_real
from cqwen_dist.config import NumberPolicy, UserError
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.run.files import write_atomically

KINDS = {"base": build_base, "causal": causal_arm, "plain": plain_arm, "untrained": plain_arm}
Figures = dict[str, Any]


def run(
    experiments: Iterable[str],
    *,
    out: Path,
    data: str | None = None,
    tokenizer: str | None = None,
    base: str | None = None,
    scale: str = "small",
    seeds: int | None = None,
    lanes: int | None = None,
    minutes: float = 60.0,
    only: list[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Figures:
    """Do the experiments (all that are named) and sum them up; JSON-ready.

    data: JSONL (default: the standard library's docstrings). tokenizer: a real one for `preserve` (V = 151,936;
    default: the small base). base: the folder of `real`'s base. lanes: trainings side by side (default: the cores).
    only: arms whose names match one of these regular expressions. Raises `UserError`.
    """
    unknown = [name for name in experiments if name not in EXPERIMENTS]
    if unknown or scale not in SCALES:
        found, allowed = (unknown[0], EXPERIMENTS) if unknown else (scale, SCALES)
        raise UserError("bench learn", found, " or ".join(allowed))
    size = with_seeds(SCALES[scale], seeds)
    began = time.monotonic()
    counts = write_corpora(out / "data", data, size.texts, size.held_out)
    medians = {name: _median_number(out / "data" / f"{name}-train.jsonl") for name in ("words", "diabetes", "cancer")}
    planner = Planner(out, size, tokenizer, medians, base)
    for name in experiments:
        EXPERIMENTS[name](planner)
    if "real" in experiments:
        write_real(out / "data", size.real)
    wanted = [t for t in planner.tasks.values() if not only or any(re.search(o, t.name) for o in only)]
    needed = {need for task in wanted for need in task.needs}
    tasks = [t for t in planner.tasks.values() if t in wanted or t.name in needed]
    tasks.sort(key=lambda task: task.kind != "base")
    say(f"{len(tasks)} runs; {counts}")
    results = run_tasks(tasks, KINDS, out, lanes or _lanes(), minutes * 60 - (time.monotonic() - began), say)
    good = {name: result for name, result in results.items() if "error" not in result}
    summary: Figures = {
        "scale": scale,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "texts": counts,
        "seconds": time.monotonic() - began,
        "failed": sorted(set(results) - set(good)),
        "missing": sorted({task.name for task in tasks} - set(results)),
    }
    ridge = {name: ridge_error(table) for name, table in tables().items()}
    summary["preserve"] = preserve_rows(good)
    summary["starts"] = start_rows(good)
    summary["numbers"] = number_rows(good, ridge)
    summary["real"] = real_rows(good)
    write_atomically(out / "summary.json", json.dumps(summary, indent=1))
    return summary


def preserve_rows(results: dict[str, Figures]) -> list[Figures]:
    """One row an arm and stage: top-1 on words and on code, the loss, KL."""
    rows = []
    for name, result in results.items():
        if not name.startswith("preserve "):
            continue
        arm = name.removeprefix("preserve ")
        if "stages" in result:
            for at in result["stages"]:
                rows.append(
                    {
                        "arm": arm,
                        "stage": at["stage"],
                        "base": at.get("eval/base_accuracy", result["start"]["base_accuracy"]),
                        "words": at["eval/accuracy"],
                        "loss": at["eval/cls_loss_mean"],
                        "code_base": at["watch/code/base_accuracy"],
                        "code": at["watch/code/accuracy"],
                        "mdae": at.get("eval/reg_mdae"),
                        "kl": at.get("train/kl"),
                    }
                )
        else:
            before, after = result["before"], result["after"]
            shared = {"arm": arm, "base": before["words"], "code_base": before["other"]}
            rows.append({**shared, "stage": "start", "words": before["words"], "code": before["other"]})
            rows.append({**shared, "stage": "lora", "words": after["words"], "code": after["other"]})
    return rows


def start_rows(results: dict[str, Figures]) -> list[Figures]:
    """One row a start: the rate that is best in the mean over seeds, and its figures' means and ranges.

    Best by words kept plus median error removed: accuracy / the base's own + 1 - MdAE / the median's. By loss where a
    reader would rather have it: `best_by_loss`, the raw loss of words and numbers together.
    """
    found: dict[str, dict[tuple[str, str], list[Figures]]] = defaultdict(lambda: defaultdict(list))
    for name, result in results.items():
        if name.startswith("starts "):
            start, lr, scales, _ = name.removeprefix("starts ").rsplit(" ", 3)
            found[start][lr, scales].append(_start_figures(result))
    rows = []
    for start in STARTS:
        if start not in found:
            continue
        means = {rate: _means(runs) for rate, runs in found[start].items()}
        best = max(means, key=lambda rate: means[rate]["score"])
        by_loss = min(means, key=lambda rate: means[rate]["loss"])
        runs = found[start][best]
        rows.append(
            {
                "start": start,
                "lr": best[0],
                "scales": best[1],
                "seeds": len(runs),
                **means[best],
                "range": {k: [min(r[k] for r in runs), max(r[k] for r in runs)] for k in ("accuracy", "mdae", "score")},
                "best_by_loss": {"lr": by_loss[0], "scales": by_loss[1], **means[by_loss]},
                "all": {" ".join(rate): mean for rate, mean in means.items()},
            }
        )
    return rows


def _start_figures(result: Figures) -> Figures:
    start, end = result["stages"][0], result["stages"][-1]
    base = result["start"]["base_accuracy"]
    scale = result["start"]["statistics"]["scale"]
    standardised = result["unit"] == "standardise"  # the density of raw values is that of targets over the scale
    told = result["numbers"]
    kept = end["eval/accuracy"] / base if base else 1.0
    score = kept + 1 - (told["mdae"] / told["median_mdae"] if told["median_mdae"] else 1.0)
    return {
        "base": base,
        "accuracy_at_start": start["eval/accuracy"],
        "accuracy": end["eval/accuracy"],
        "cls_loss": end["eval/cls_loss_mean"],
        "loss": end["eval/cls_loss_mean"] + end["eval/reg_nll"] + (np.log(scale).item() if standardised else 0.0),
        "f1": end["eval/num_f1"],
        "mdae": told["mdae"],
        "median_mdae": told["median_mdae"],
        "coverage": told["coverage_raw"],
        "score": score,
    }


def number_rows(results: dict[str, Figures], ridge: dict[str, float]) -> list[Figures]:
    """One row a corpus and way of telling: the best LoRA rate by the mean held-out error, means over seeds."""
    found: dict[tuple[str, str], dict[str, list[Figures]]] = defaultdict(lambda: defaultdict(list))
    for name, result in results.items():
        if name.startswith("numbers ") and "numbers" in result:
            what, lr, _ = name.removeprefix("numbers ").rsplit(" ", 2)
            corpus, way = what.split(" ", 1)
            found[corpus, way][lr].append(result["numbers"])
    rows = []
    for (corpus, way), by_rate in sorted(found.items()):
        means = {rate: _means(runs) for rate, runs in by_rate.items()}
        best = min(means, key=lambda rate: means[rate]["mdae"])
        runs = by_rate[best]
        rows.append(
            {
                "corpus": corpus,
                "way": way,
                "lr": best,
                "seeds": len(runs),
                **means[best],
                "range": [min(r["mdae"] for r in runs), max(r["mdae"] for r in runs)],
                "ridge": ridge.get(corpus),
                "each": runs,
            }
        )
    return rows


def _means(runs: list[Figures]) -> Figures:
    keys = [k for k, v in runs[0].items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return {k: statistics.fmean(run[k] for run in runs) for k in keys}


def _median_number(path: Path) -> float:
    """The median of the numbers behind the prompts of the training texts."""
    values = [
        value
        for item in read_items(path)
        for start, _, value in find_numbers(item.text, NumberPolicy())
        if start >= len(item.prompt)
    ]
    return float(np.median(values)) if values else 0.0


def _lanes() -> int:
    """One a core; on a GPU four, which is where contexts that take turns stop paying (seen on an H200)."""
    return min(4 if torch.cuda.is_available() else 12, len(os.sched_getaffinity(0)))


def render(summary: Figures) -> list[Table]:
    """``run``'s result for a terminal."""
    out = []
    if summary["preserve"]:
        table = _table(
            "Top-1 before and after every stage",
            ["arm", "stage", "base", "words", "code base", "code", "loss", "MdAE", "KL"],
        )
        for row in summary["preserve"]:
            shares = [f"{row[k]:.1%}" for k in ("base", "words", "code_base", "code")]
            rest = [_number(row.get(k)) for k in ("loss", "mdae", "kl")]
            table.add_row(row["arm"], row["stage"], *shares, *rest)
        out.append(table)
    if summary["starts"]:
        table = _table(
            "Starts, each at its best rate",
            [
                "start",
                "lr",
                "scales",
                "seeds",
                "base",
                "at start",
                "words",
                "(range)",
                "MdAE",
                "(range)",
                "median's",
                "F1",
                "score",
            ],
        )
        for row in summary["starts"]:
            low, high = row["range"]["accuracy"]
            first, last = row["range"]["mdae"]
            table.add_row(
                row["start"],
                row["lr"],
                row["scales"],
                str(row["seeds"]),
                f"{row['base']:.1%}",
                f"{row['accuracy_at_start']:.1%}",
                f"{row['accuracy']:.1%}",
                f"{low:.1%}-{high:.1%}",
                _number(row["mdae"]),
                f"{first:.3g}-{last:.3g}",
                _number(row["median_mdae"]),
                f"{row['f1']:.3f}",
                f"{row['score']:.3f}",
            )
        out.append(table)
    if summary["numbers"]:
        table = _table(
            "Held-out numbers",
            [
                "corpus",
                "way",
                "lr",
                "seeds",
                "MdAE",
                "(range)",
                "repeated",
                "new",
                "median's",
                "ridge",
                "exact",
                "raw 90 %",
                "conformal 90 %",
                "99 % of a binomial",
            ],
        )
        for row in summary["numbers"]:
            first, last = row["range"]
            intervals = ["", "", ""]
            if "coverage_raw" in row:
                low, high = row["each"][0]["binomial"]
                held = ", ".join(f"{run['coverage_conformal']:.1%}" for run in row["each"])
                intervals = [f"{row['coverage_raw']:.1%}", held, f"{low:.1%}-{high:.1%}"]
            table.add_row(
                row["corpus"],
                row["way"],
                row["lr"],
                str(row["seeds"]),
                _number(row["mdae"]),
                f"{first:.3g}-{last:.3g}",
                _number(row.get("mdae_repeated")),
                _number(row.get("mdae_new")),
                _number(row["median_mdae"]),
                _number(row["ridge"]),
                f"{row['exact']:.1%}",
                *intervals,
            )
        out.append(table)
    if summary["real"]:
        out.append(real_table(summary["real"]))
    return out


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("arm", "stage", "start", "corpus", "way") else "right")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
