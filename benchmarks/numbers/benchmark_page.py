"""Shows the results of `python -m benchmarks numbers` as Markdown tables and a chart of the error laws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.line_chart import line_chart, sheet
from benchmarks.numbers.predicted_laws import HELD, LAWS
from benchmarks.numbers.published import PROTOCOLS
from cqwen_dist.tables.judging import DRAWS, OURS

# A substring of a competitor's name decides its kind. The empty one matches every name, so it is tried last.
KINDS = {"best head on z": ", on z", "best with adapters": ", LoRA", "best without a language model": ""}


def page(document: dict[str, Any]) -> str:
    """Markdown: a summary of all data sets, one table per set with medians over the splits, and the error laws."""
    lines = [
        f"Measured {document['date']} on {document['machine']}; base {Path(document['base']).name}, "
        f"{document['minutes']:g} minutes a fit; judged by "
        + (f"{document['test_rows']:,} drawn test rows of each split" if document["test_rows"] else "all test rows")
        + ". Medians over the splits, and their range.",
        "",
        *_in_short(document["sets"]),
    ]
    for name, splits in document["sets"].items():
        published = PROTOCOLS[name].published
        known = "" if published is None else f", RMSE published {published:g} (Monte Carlo dropout, 20 splits)"
        lines += ["", f"### {name}: {len(splits)} splits{known}", ""]
        lines += [
            "| | MAE | above ours | RMSE | R2 | CRPS | above ours | log likelihood | 90 % holds | width | s |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for model in splits[0]:
            of_model = [split[model] for split in splits]
            keys = ("mae", "rmse", "r2", "crps", "log_likelihood", "coverage_90", "width_90", "seconds")
            cells = [_median(of_model, key) for key in keys]
            for place, key in ((1, "mae"), (5, "crps")):
                cells.insert(place, "" if model == OURS else above(splits, model, key))
            lines.append(f"| {model} | {' | '.join(cells)} |")
        lines += ["", *(f"`cqwen fit` says: {verdict}" for verdict in document["verdicts"][name])]
        if name in ("addition", "subtraction"):
            ours = [split[OURS] for split in splits]
            exact, relative = _median(ours, "exact"), _median(ours, "relative")
            lines += ["", f"Exact to the unit {exact}, median relative error {relative}."]
    lines += ["", "### The law of the errors", "", f"| | {' | '.join(LAWS)} |", "|---" * (1 + len(LAWS)) + "|"]
    for name, found in document["laws"].items():
        cells = [f"{of['log_likelihood']:.3f}, {of['coverage_90']:.1%}" for of in found.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def above(splits: Sequence[dict[str, dict[str, Any]]], model: str, key: str) -> str:
    """By how much a model's mean score is above ours, with 95 % of a paired bootstrap over all splits' rows."""
    of, ours = (np.concatenate([split[name]["rows"][key] for split in splits]) for name in (model, OURS))
    counts = np.random.default_rng(0).multinomial(len(of), np.full(len(of), 1 / len(of)), DRAWS) / len(of)
    low, high = np.quantile(counts @ (of - ours), [0.025, 0.975])
    return f"{(of - ours).mean():+.3g} ({low:+.3g} to {high:+.3g})"


def _in_short(sets: dict[str, list[dict[str, dict[str, float]]]]) -> list[str]:
    """A table with one line per data set: our mean absolute error and CRPS next to the best competitor's."""
    heads = ["splits", f"MAE: {OURS}", *KINDS, "CRPS: " + OURS, "of all others", f"90 % of {OURS} holds"]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name, splits in sets.items():
        typical = {
            model: {key: median(split[model][key] for split in splits) for key in ("mae", "crps")}
            for model in splits[0]
        }
        ours, least = typical.pop(OURS), dict.fromkeys(KINDS, math.inf)
        for model, of_model in typical.items():
            kind = next(kind for kind, mark in KINDS.items() if mark in model)
            least[kind] = min(least[kind], of_model["mae"])
        cells = [str(len(splits)), f"{ours['mae']:.4g}"]
        cells += ["" if mae == math.inf else f"{mae:.4g}" for mae in least.values()]
        cells += [f"{ours['crps']:.4g}", f"{min(of_model['crps'] for of_model in typical.values()):.4g}"]
        cells.append(f"{median(split[OURS]['coverage_90'] for split in splits):.0%}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def laws_picture(document: dict[str, Any]) -> str:
    """An SVG with one chart per data set: the share of errors inside each law's central intervals, by level."""
    charts = [
        line_chart(
            name,
            {law: list(zip(HELD, of["held"], strict=True)) for law, of in found.items()},
            "level of the interval",
            "share of the errors in it",
            diagonal=True,
        )
        for name, found in document["laws"].items()
    ]
    return sheet("Which law do the errors have? On the diagonal an interval holds what it says.", charts, 2)


def _median(results: Sequence[dict[str, float]], key: str) -> str:
    if not all(key in of for of in results):
        return ""
    found = [of[key] for of in results]
    return f"{median(found):.4g}" + f" ({min(found):.3g} to {max(found):.3g})" * (len(found) > 1)
