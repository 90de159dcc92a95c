"""Metrics of predicted numbers: errors in the raw unit, intervals, CRPS, and chart data for a report.

Intervals of a Cauchy that is fitted to light-tailed residuals are too wide, and errors of some sizes are larger than
their scales say. Split conformal prediction (Vovk; Lei et al. 2018) recalibrates both. The held-out numbers give scores
r_i = |t_i - loc_i| / scale_i, in the target's unit, in which Y has its law. By loc_i, the predicted size, they are cut
into blocks of about BLOCK (Vovk's "Mondrian"). Let q be the ceil((m+1) level)-th smallest of a block's m scores. Then
loc +- q scale contains a new exchangeable number that is predicted in this block with probability >= level, for any
model and any errors; so it does over all blocks. Parts of a block have no promise. The probability is over the held-out
numbers too: with 80 of them, the share of new ones inside has a standard deviation of 3 % at 90 %. The factor of a
level is q over the half-width of the law; raw intervals have factor 1. The target's unit is monotone in the raw unit,
so the ends can be mapped back. A checkpoint stores the factors from all held-out numbers. Coverage is measured on
halves of the texts, each with the factors of the other half.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cqwen_dist.heads.candidates import best_bar
from cqwen_dist.heads.intervals import LEVELS, SHARES, Intervals, number_interval
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.ops.cauchy import Cauchy

CALIBRATION = "calibration"  # key of the factors in a checkpoint's metrics
RAW = Intervals()  # intervals of Y's law
BLOCK, MOST_BLOCKS = 80, 10  # numbers in a block of predicted sizes; blocks
DRAWN = 1000  # most numbers in a chart
PIT_BINS = 20
CURVE = tuple(round(0.05 * i, 2) for i in range(1, 20))  # levels of the coverage plot


def for_calibration(texts: np.ndarray) -> np.ndarray:
    """The half [n] bool of held-out texts [n] int (numbered in data order).

    The top bit of a golden-ratio hash of the text number. The halves are even, and the same on any number of ranks.
    Numbers of one text are dependent, so a text is never split. Parity would fail for data that alternates.
    """
    return (texts.astype(np.uint64) * np.uint64(2654435769) & np.uint64(0xFFFFFFFF)) >> np.uint64(31) == 1


def surest(doubt: np.ndarray, error: np.ndarray, of: Callable[[np.ndarray], float]) -> tuple[list[float], list[float]]:
    """What abstaining buys (S4 3.3.3): (largest doubt, risk) of the surest share of N answers, for each of `SHARES`;
    nothing without any.

    doubt [N], error [N]: of each answer. of: the risk of some errors, such as their mean. The doubt of a word is its
    surprise under softmax(loc_S), which tells wrong words better than P, sum P or the scales do (docs/experiments.md);
    the doubt of a number is scale_Y, to which the width of its interval is proportional.
    """
    if not len(doubt):
        return [], []
    order = np.argsort(doubt, kind="stable")
    ends = [max(1, round(share * len(order))) for share in SHARES]
    return [float(doubt[order[end - 1]]) for end in ends], [float(of(error[order[:end]])) for end in ends]


def risk_80(risks: list[float]) -> float:
    """The risk of the surest 80 %, out of those for `SHARES`; NaN without any."""
    return risks[SHARES.index(0.8)] if risks else math.nan


def interval_factors(scores: np.ndarray, y: Cauchy, levels: tuple[float, ...] = LEVELS) -> Intervals:
    """Factors from scores [n] = |t - loc| / scale, >= 0, by blocks of the predictions y [n]. Leaves out levels that m
    numbers of a block cannot guarantee (ceil((m+1) level) > m)."""
    edges, parts = _blocks(scores, y.loc.numpy())
    found = {}
    for level in levels:
        ranked = [(part, math.ceil((len(part) + 1) * level - 1e-9)) for part in parts]
        if all(1 <= rank <= len(part) for part, rank in ranked):
            found[level] = tuple(float(part[rank - 1]) / y.half_width(level) for part, rank in ranked)
    return Intervals(found, len(scores), edges=edges)


def _blocks(scores: np.ndarray, loc: np.ndarray) -> tuple[tuple[float, ...], list[np.ndarray]]:
    """Edges of the blocks by loc [n], and each block's scores, ascending. The number at an edge is in none: by their
    ranks, a new number and the others of its block are then exchangeable."""
    order, starts = np.argsort(loc, kind="stable"), [0]
    count = min(max(len(loc) // BLOCK, 1), MOST_BLOCKS)
    for block in range(1, count):
        # Equal predictions are in one block: its edge is the first of them
        at = int(np.searchsorted(loc[order], loc[order[round(block * len(loc) / count)]]))
        starts += [at] * (at - starts[-1] >= BLOCK // 2)
    ends = [*starts[1:], len(loc)]
    parts = [np.sort(scores[order[start + (start > 0) : end]]) for start, end in zip(starts, ends, strict=True)]
    return tuple(loc[order[starts[1:]]].tolist()), parts


@dataclass(frozen=True)
class Numbers:
    """Held-out numbers, float64 [M] in data order: truth in the raw unit, Y in the target's unit, text number."""

    true: np.ndarray
    loc: np.ndarray
    scale: np.ndarray
    text: np.ndarray  # int64: number of the text (packed row) in the held-out data
    likeliest: np.ndarray | None = None  # raw unit: the likeliest exact value; nan without one
    p: np.ndarray | None = None  # its probability


def number_metrics(
    numbers: Numbers, target: TargetTransform, baseline: float | None, known: Intervals = RAW
) -> tuple[dict[str, float], Intervals, dict[str, Any]]:
    """(all metrics of M >= 1 numbers, interval factors, plain chart data for a report).

    baseline: a constant prediction, raw unit. known: saved factors from other data, to be tested on these numbers.

    eval/coverage_50, _90, _95        fraction of all numbers inside the raw interval
    eval/coverage_90_conformal, ...   recalibrated, each half with the factors of the other half
    eval/coverage_90_known, ...       fraction of all numbers with the known factors
    eval/width_90, _90_conformal      median width of these intervals, raw unit
    eval/crps                         mean CRPS, raw unit (`Cauchy.crps`); eval/crps_target: in the target's unit
    eval/reg_mdae_80                  median error of the 80 % with the smallest scales; exact values are left out
    eval/exact                        fraction of numbers that are written exactly right, to 9 digits
    eval/candidates, _right           fraction that is an exact value of the head's, and the right ones among them
    Exact values have the bar of `best_bar`; for these metrics each half of the texts uses the other's. Recalibration
    leaves them out: their errors are 0 or arbitrary. With a nonlinear transform there is only eval/crps_target, as the
    CRPS of a log-Cauchy is infinite.
    """
    law = target.kind
    y = law(torch.from_numpy(numbers.loc), torch.from_numpy(numbers.scale))
    goal = target.forward(torch.from_numpy(numbers.true)).double()
    exact, bar = _exact(numbers, y, goal, target)
    new = ~exact
    if exact.any():
        y = y._replace(loc=torch.where(torch.from_numpy(exact), _candidate(numbers, target), y.loc))
    error = np.abs(target.inverse(y.loc).numpy() - numbers.true)
    metrics = _errors(numbers, error, y, goal, target, baseline)
    if numbers.likeliest is not None:
        right = exact & np.isclose(numbers.likeliest, numbers.true, rtol=1e-9, atol=1e-9)
        metrics |= {"eval/exact": float(right.mean()), "eval/candidates": float(exact.mean())}
        metrics["eval/candidates_right"] = float(right.sum() / max(exact.sum(), 1))

    # Coverage and widths of the intervals
    scores = ((goal - y.loc).abs() / y.scale).numpy()
    doubts, risk = surest(numbers.scale[new], error[new], np.median)
    inexact = law(y.loc[new], y.scale[new])
    factors = replace(interval_factors(scores[new], inexact), bar=bar, doubts={"numbers": doubts})
    metrics["eval/reg_mdae_80"] = risk_80(risk)
    raw = {level: float((scores <= law.half_width(level)).mean()) for level in CURVE}
    inside = {level: _inside(scores[new], inexact, for_calibration(numbers.text)[new], level) for level in CURVE}
    for level in LEVELS:
        percent = f"{100 * level:.0f}"
        metrics[f"eval/coverage_{percent}"] = raw[level]
        if len(inside[level]):
            metrics[f"eval/coverage_{percent}_conformal"] = float(inside[level].mean())
        if level in known.factors:
            metrics[f"eval/coverage_{percent}_known"] = float((scores <= known.half_width(level, y).numpy()).mean())
    low, high = number_interval(y, target, RAW, 0.9)
    metrics["eval/width_90"] = float(np.median((high - low).numpy()))
    low, high = number_interval(y, target, factors, 0.9)
    if 0.9 in factors.factors:
        metrics["eval/width_90_conformal"] = float(np.median((high - low).numpy()))
    if len(inside[0.9]):
        metrics["eval/conformal_numbers"] = float(len(inside[0.9]))

    # Chart data for a report
    drawn = {"true": numbers.true, "predicted": target.inverse(y.loc), "low": low, "high": high}
    some = np.unique(np.linspace(0, len(scores) - 1, min(DRAWN, len(scores))).astype(np.int64))
    drawing = {
        "levels": list(CURVE),
        "raw": list(raw.values()),
        "conformal": [float(held.mean()) if len(held) else None for held in inside.values()],
        "measured": len(inside[0.5]),
        "count": len(scores),
        "risk": risk,  # median error of the surest numbers, by `SHARES`
        "pit": np.histogram(y.cdf(goal).numpy(), PIT_BINS, (0.0, 1.0))[0].tolist(),  # of F(truth)
        "interval": "conformal" if 0.9 in factors.factors else "raw",
        **{name: [float(f"{value:.6g}") for value in np.asarray(values)[some]] for name, values in drawn.items()},
    }
    return metrics, factors, drawing


def _candidate(numbers: Numbers, target: TargetTransform) -> torch.Tensor:
    """[M] float64 in the target's unit: the likeliest exact values."""
    return target.forward(torch.from_numpy(numbers.likeliest)).double()


def _exact(numbers: Numbers, y: Cauchy, goal: torch.Tensor, target: TargetTransform) -> tuple[np.ndarray, float]:
    """([M] bool: which numbers are exact values, each half with the bar of the other; the bar of all numbers)."""
    if numbers.likeliest is None or numbers.p is None:
        return np.zeros(len(goal), bool), RAW.bar
    # How near a prediction is, between 0 and 1: 1/2 at the usual error of Y, so that no single number decides the bar
    usual = (goal - y.loc).abs().median().clamp(min=1e-12)
    near, other = (usual / (usual + (goal - loc).abs()) for loc in (_candidate(numbers, target), y.loc))
    gain = (near - other).nan_to_num(0.0).numpy()
    first, exact = for_calibration(numbers.text), np.zeros(len(goal), bool)
    for own in (first, ~first):
        exact[own] = numbers.p[own] > best_bar(numbers.p[~own], gain[~own])
    return exact, best_bar(numbers.p, gain)


def _errors(
    numbers: Numbers,
    error: np.ndarray,
    y: Cauchy,
    goal: torch.Tensor,
    target: TargetTransform,
    baseline: float | None,
) -> dict[str, float]:
    """Error metrics. error [M]: absolute, raw unit. y, goal: in the target's unit."""
    crps = y.crps(goal)
    metrics = {
        "eval/reg_mae": float(error.mean()),
        "eval/reg_mdae": float(np.median(error)),
        "eval/reg_nll": float(y.nll(goal).mean()),
        "eval/crps_target": float(crps.mean()),
        "eval/numbers": float(len(error)),
    }
    if target.linear:
        metrics["eval/crps"] = float(target.inverse_scale(crps).mean())
    if baseline is not None:
        constant = np.abs(numbers.true - baseline)
        metrics |= {"eval/baseline_mdae": float(np.median(constant)), "eval/baseline_mae": float(constant.mean())}
    return metrics


def _inside(scores: np.ndarray, y: Cauchy, first: np.ndarray, level: float) -> np.ndarray:
    """Whether each score is inside y's interval with the factors of the other half, if that can guarantee the level.
    y [n]. first [n] bool: the halves."""
    found = [np.zeros(0, bool)]
    for own in (first, ~first):
        factors = interval_factors(scores[~own], type(y)(y.loc[~own], y.scale[~own]), (level,))
        if level in factors.factors:
            found.append(scores[own] <= factors.half_width(level, y).numpy()[own])
    return np.concatenate(found)
