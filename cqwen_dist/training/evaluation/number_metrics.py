"""Metrics of predicted numbers: errors in the raw unit, intervals, CRPS, and what a report draws.

Intervals are recalibrated by split conformal prediction (Vovk; Lei et al. 2018), as those of a Cauchy that is fitted to
light-tailed residuals are too wide. The held-out numbers give the scores r_i = |t_i - loc_i| / scale_i, in the target's
unit, in which Y is Cauchy. Let q be the ceil((n+1) level)-th smallest score. Then loc +- q scale contains a new number
of the same kind with probability >= level, whatever the model. The factor of a level is q over the Cauchy's own
half-width: an interval is loc +- factor tan(pi level/2) scale, and raw intervals have factor 1. The target's unit is
monotone in the raw one, so the ends can be mapped back. A checkpoint gets the factors of all held-out numbers. Coverage
is measured by halves of the texts, each with the factors of the other half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cqwen_dist.generate.numbers import number_interval
from cqwen_dist.heads.intervals import LEVELS, Intervals
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.ops.cauchy import Cauchy

CALIBRATION = "calibration"  # key of the factors in a checkpoint's metrics
RAW = Intervals()  # the Cauchy's own
DRAWN = 1000  # numbers in a report's drawing, at most
PIT_BINS = 20
CURVE = tuple(round(0.05 * i, 2) for i in range(1, 20))  # levels of the coverage plot


def for_calibration(texts: np.ndarray) -> np.ndarray:
    """[n] bool: the half to which held-out texts [n] int (numbered in the data's order) belong.

    The top bit of a golden-ratio hash of the number: about half, evenly spread, the same on any number of ranks. By
    text, as the numbers of one text are not independent. Not by parity, as data may alternate.
    """
    return (texts.astype(np.uint64) * np.uint64(2654435769) & np.uint64(0xFFFFFFFF)) >> np.uint64(31) == 1


def interval_factors(scores: np.ndarray, levels: tuple[float, ...] = LEVELS) -> Intervals:
    """Factors from scores [n] = |t - loc| / scale, >= 0.

    A level that n numbers cannot guarantee (ceil((n+1) level) > n) is left out.
    """
    ordered, found = np.sort(scores), {}
    for level in levels:
        rank = math.ceil((len(ordered) + 1) * level - 1e-9)
        if 1 <= rank <= len(ordered):
            found[level] = float(ordered[rank - 1]) / RAW.half_width(level)
    return Intervals(found, len(ordered))


@dataclass(frozen=True)
class Numbers:
    """Held-out numbers, all float64 [M] in the data's order: the truth in the raw unit, Y in the target's, the text."""

    true: np.ndarray
    loc: np.ndarray
    scale: np.ndarray
    text: np.ndarray  # int64: the number of the text (packed row) in the held-out data
    exact: np.ndarray | None = None  # bool: loc is a value that the head decided to all its digits, not Y's own

    def __len__(self) -> int:
        return len(self.true)


@dataclass(frozen=True)
class NumberMetrics:
    """metrics: by name; factors: of the intervals; drawing: plain values for a report."""

    metrics: dict[str, float]
    factors: Intervals
    drawing: dict[str, Any]


def number_metrics(
    numbers: Numbers, target: TargetTransform, baseline: float | None, known: Intervals = RAW
) -> NumberMetrics:
    """All metrics of M >= 1 numbers. baseline: a constant prediction, raw unit.

    known: factors that were measured elsewhere (saved with the run), to be tried on these numbers.

    eval/coverage_50, _90, _95        share inside the Cauchy's own interval, of all numbers
    eval/coverage_90_conformal, ...   the same, recalibrated: each half with the factors of the other
    eval/coverage_90_known, ...       with the known factors, of all numbers
    Recalibration is by and of the numbers that are not `exact`: the errors of exact ones are 0 or anything.
    eval/width_90, _90_conformal      median width of those intervals, raw unit
    eval/crps                         mean CRPS, raw unit (`Cauchy.crps`); eval/crps_target: in the target's unit
    A transform that is not linear has eval/crps_target only: a log-Cauchy's CRPS is infinite.
    """
    y = Cauchy(torch.from_numpy(numbers.loc), torch.from_numpy(numbers.scale))
    goal = target.forward(torch.from_numpy(numbers.true)).double()
    metrics = _errors(numbers, y, goal, target, baseline)

    # Coverage and widths of the intervals
    scores = ((goal - y.loc).abs() / y.scale).numpy()
    new = np.ones(len(scores), bool) if numbers.exact is None else ~numbers.exact
    factors = interval_factors(scores[new])
    raw = {level: float((scores <= RAW.half_width(level)).mean()) for level in CURVE}
    inside = {level: _inside(scores[new], for_calibration(numbers.text)[new], level) for level in CURVE}
    for level in LEVELS:
        percent = f"{100 * level:.0f}"
        metrics[f"eval/coverage_{percent}"] = raw[level]
        if len(inside[level]):
            metrics[f"eval/coverage_{percent}_conformal"] = float(inside[level].mean())
        if level in known.factors:
            metrics[f"eval/coverage_{percent}_known"] = float((scores <= known.half_width(level)).mean())
    low, high = number_interval(y, target, RAW, 0.9)
    metrics["eval/width_90"] = float(np.median((high - low).numpy()))
    low, high = number_interval(y, target, factors, 0.9)
    if 0.9 in factors.factors:
        metrics["eval/width_90_conformal"] = float(np.median((high - low).numpy()))
    if len(inside[0.9]):
        metrics["eval/conformal_numbers"] = float(len(inside[0.9]))

    # A report's drawing
    drawn = {"true": numbers.true, "predicted": target.inverse(y.loc), "low": low, "high": high}
    some = np.unique(np.linspace(0, len(numbers) - 1, min(DRAWN, len(numbers))).astype(np.int64))
    drawing = {
        "levels": list(CURVE),
        "raw": list(raw.values()),
        "conformal": [float(held.mean()) if len(held) else None for held in inside.values()],
        "measured": len(inside[0.5]),
        "count": len(numbers),
        "pit": np.histogram(y.cdf(goal).numpy(), PIT_BINS, (0.0, 1.0))[0].tolist(),  # of F(truth)
        "interval": "conformal" if 0.9 in factors.factors else "raw",
        **{name: [float(f"{value:.6g}") for value in np.asarray(values)[some]] for name, values in drawn.items()},
    }
    return NumberMetrics(metrics, factors, drawing)


def _errors(
    numbers: Numbers, y: Cauchy, goal: torch.Tensor, target: TargetTransform, baseline: float | None
) -> dict[str, float]:
    """The metrics of errors. y, goal: in the target's unit."""
    error = np.abs(target.inverse(y.loc).numpy() - numbers.true)
    crps = y.crps(goal)
    metrics = {
        "eval/reg_mae": float(error.mean()),
        "eval/reg_mdae": float(np.median(error)),
        "eval/reg_nll": float(y.nll(goal).mean()),
        "eval/crps_target": float(crps.mean()),
        "eval/numbers": float(len(numbers)),
    }
    if target.linear:
        metrics["eval/crps"] = float(target.inverse_scale(crps).mean())
    if baseline is not None:
        constant = np.abs(numbers.true - baseline)
        metrics |= {"eval/baseline_mdae": float(np.median(constant)), "eval/baseline_mae": float(constant.mean())}
    return metrics


def _inside(scores: np.ndarray, first: np.ndarray, level: float) -> np.ndarray:
    """Whether each score is within the interval of the other half's factors. first [n] bool: the halves.

    A half is left out if the other one cannot guarantee the level.
    """
    found = [np.zeros(0, bool)]
    for own in (first, ~first):
        factors = interval_factors(scores[~own], (level,))
        if level in factors.factors:
            found.append(scores[own] <= factors.half_width(level))
    return np.concatenate(found)
