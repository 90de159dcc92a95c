"""Measures of how well a score tells right from wrong, and the verdict on a claim from its values over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata, spearmanr, t

LEVEL = 0.95  # of the intervals over seeds


def auroc(score: np.ndarray, wanted: np.ndarray) -> float:
    """The probability that a wanted item has a larger score than another one; equal scores count half.

    score [n] float, wanted [n] bool. NaN where all or none are wanted.
    """
    positive = int(wanted.sum())
    negative = len(wanted) - positive
    if not positive or not negative:
        return math.nan
    ranks = rankdata(score)
    return float((ranks[wanted].sum() - positive * (positive + 1) / 2) / (positive * negative))


def rejection_curve(score: np.ndarray, right: np.ndarray, points: int = 21) -> list[tuple[float, float]]:
    """(share answered, share of these that are right), where the items of the largest score are refused first.

    score [n] float, right [n] bool. Shares from 0.05 to 1.
    """
    order = np.argsort(score, kind="stable")
    hits = np.cumsum(right[order])
    kept = np.unique(np.clip((np.linspace(0.05, 1.0, points) * len(right)).round().astype(int), 1, None))
    return [(float(n / len(right)), float(hits[n - 1] / n)) for n in kept]


def calibration_error(p: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    """Expected calibration error: the mean distance of P and the share that is right, in bins of equal counts.

    p [n] in [0, 1], right [n] bool.
    """
    order = np.argsort(p, kind="stable")
    parts = np.array_split(order, min(bins, len(p)))
    return float(sum(abs(p[part].mean() - right[part].mean()) * len(part) for part in parts) / len(p))


def by_tenths(key: np.ndarray, *columns: np.ndarray) -> list[list[float]]:
    """The means of the key and of each column [n] in ten parts of equal counts, by ascending key."""
    parts = np.array_split(np.argsort(key, kind="stable"), min(10, len(key)))
    return [[float(column[part].mean()) for column in (key, *columns)] for part in parts]


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's; 0 where one of them is constant, as it then says nothing of the other."""
    if np.ptp(a) <= 1e-6 * np.abs(a).max(initial=0.0) or np.ptp(b) == 0:
        return 0.0
    return float(spearmanr(a, b).statistic)


@dataclass(frozen=True)
class Claim:
    """A claim and the values that decide it: it holds if the interval over seeds is above the bar."""

    claim: str
    measure: str
    bar: float
    values: list[float]

    def judged(self) -> dict[str, Any]:
        """The fields, the mean, the interval of the mean over seeds (Student's t), and the verdict."""
        low, high = interval(self.values)
        mean = float(np.mean(self.values))
        verdict = "holds" if low > self.bar else "does not hold" if high <= self.bar else "undecided"
        return {**asdict(self), "mean": mean, "low": low, "high": high, "verdict": verdict}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The ends of the mean's interval over seeds; infinite for one value, NaN for a value that is not finite."""
    mean = float(np.mean(values))
    if not math.isfinite(mean):
        return math.nan, math.nan
    if len(values) < 2:
        return -math.inf, math.inf
    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return mean - half, mean + half


def cell(values: Sequence[float], digits: int = 3) -> str:
    """A table's cell: the mean, and half the interval's width where there are several seeds."""
    low, high = interval(values)
    half = f" ± {(high - low) / 2:.{digits}f}" if math.isfinite(high - low) else ""
    return f"{float(np.mean(values)):.{digits}f}{half}"
