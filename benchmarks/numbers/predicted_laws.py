"""Scores predicted distributions ("laws") of numbers, in the same way for every model."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
import torch

from cqwen_dist.heads.intervals import LEVELS
from cqwen_dist.heads.targets import signed_log
from cqwen_dist.ops.number_laws import LAWS as NUMBER_LAWS
from cqwen_dist.tables.judging import errors, intervals

QUANTILE_GRID = "quantile grid"
QUANTILES = sorted([0.5, *((1 - level) / 2 for level in LEVELS), *((1 + level) / 2 for level in LEVELS)])
LAWS = {"Cauchy": "cauchy", "Laplace": "laplace", "Student t": "t", "Gauss": "norm", QUANTILE_GRID: ""}
HELD = [i / 20 for i in range(1, 20)]  # levels of central intervals


@dataclass(frozen=True)
class Predicted:
    """Predicted laws for n numbers: quantiles [n,7] at `QUANTILES`, and if available log_density [n] at the truth."""

    quantiles: np.ndarray
    log_density: np.ndarray | None = None

    @classmethod
    def normal(cls, middle: np.ndarray, spread: np.ndarray | float, truth: np.ndarray) -> Predicted:
        """From normal laws. middle [n]; spread [n] or a scalar; truth [n]."""
        from scipy.stats import norm

        wide = np.broadcast_to(spread, middle.shape)
        return cls(middle[:, None] + wide[:, None] * norm.ppf(QUANTILES), norm.logpdf(truth, middle, wide))

    @classmethod
    def by_quartiles(cls, quantiles: np.ndarray, truth: np.ndarray, by_log: bool, law: str) -> Predicted:
        """From laws with this name, recovered from the median and quartiles in quantiles [n,7]; truth [n].

        The quantiles may be rounded. by_log: sign(v) ln(1 + |v|) has the law, not v.
        """

        def unit(values: np.ndarray) -> np.ndarray:
            return signed_log(values) if by_log else values

        low, middle, high = (unit(quantiles[:, QUANTILES.index(at)]) for at in (0.25, 0.5, 0.75))
        # Rounding can make the quartiles equal, so the scale needs a floor.
        scale = np.maximum((high - low) / 2, 1e-6 * np.abs(middle).clip(min=1e-6)) / NUMBER_LAWS[law].half_width(0.5)
        y = NUMBER_LAWS[law](*map(torch.from_numpy, (middle, scale)))
        density = -y.nll(torch.from_numpy(unit(truth))).numpy()
        return cls(quantiles, density - np.log1p(np.abs(truth)) if by_log else density)

    @classmethod
    def point(cls, predicted: np.ndarray) -> Predicted:
        """From predictions [n] without a law."""
        return cls(np.repeat(predicted[:, None], len(QUANTILES), 1))

    def scores(self, truth: np.ndarray) -> dict[str, Any]:
        """Scores for truth [n], without interval scores if every law is a point.

        crps: 2 int pinball(level) d level, where each quantile stands for the nearest levels; for a point, the absolute
        error. rows: the absolute error and the CRPS of each number [n].
        """
        middle = self.quantiles[:, len(LEVELS)]
        levels = np.array(QUANTILES)
        between = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
        error = truth[:, None] - self.quantiles
        pinball = np.maximum(levels * error, (levels - 1) * error)
        crps = 2 * pinball @ np.diff(between)
        ends = [QUANTILES.index(at) for at in ((1 - 0.9) / 2, (1 + 0.9) / 2)]
        further = {} if self.log_density is None else {"log_likelihood": float(self.log_density.mean())}
        if np.ptp(self.quantiles, axis=1).any():
            further |= intervals(self.quantiles[:, ends], truth)
        return {
            **errors(middle, truth),
            "crps": float(crps.mean()),
            **further,
            "exact": float((np.abs(middle - truth) < 0.5).mean()),
            "relative": float(np.median(np.abs(middle - truth) / np.abs(truth).clip(min=1e-9))),
            "rows": {"mae": np.abs(middle - truth).tolist(), "crps": crps.tolist()},
        }


def laws(error: np.ndarray) -> dict[str, dict[str, Any]]:
    """For each law, the mean log likelihood of the errors [n] and their share in its central intervals at `HELD`.

    Each law is fitted to one half of the errors and measured on the other half, then vice versa.
    """
    from scipy import stats

    order = np.random.default_rng(0).permutation(len(error))
    halves = error[order[::2]], error[order[1::2]]
    found = {}
    for name, law in LAWS.items():
        of_scipy = getattr(stats, law, None)
        both = [
            (of_scipy(*of_scipy.fit(own)) if of_scipy else QuantileGrid(own), other)
            for own, other in (halves, halves[::-1])
        ]
        held = [
            mean(float(np.mean((of.ppf((1 - at) / 2) <= e) & (e <= of.ppf((1 + at) / 2)))) for of, e in both)
            for at in HELD
        ]
        found[name] = {
            "log_likelihood": mean(float(of.logpdf(e).mean()) for of, e in both),
            "coverage_90": held[HELD.index(0.9)],
            "held": held,
        }
    return found


class QuantileGrid:
    """A nonparametric law: sample quantiles at 5, 10, ..., 95 %, uniform between them, with exponential tails.

    The tails have the mean excess in the sample. Distances are at least a thousandth of the grid's width.
    """

    at = np.arange(1, 20) / 20

    def __init__(self, sample: np.ndarray) -> None:
        grid = np.quantile(sample, self.at)
        least = max((grid[-1] - grid[0]) / 1000, 1e-12)
        self.grid = grid[0] + np.concatenate([[0.0], np.diff(grid).clip(min=least).cumsum()])
        beyond = self.grid[0] - sample, sample - self.grid[-1]
        self.tails = [float(max(excess[excess > 0].sum() / max((excess > 0).sum(), 1), least)) for excess in beyond]

    def ppf(self, share: float) -> float:
        """The quantile at `share` in (0, 1)."""
        edge, (low, high) = self.at[0], self.tails
        if share < edge:
            return float(self.grid[0] + low * np.log(share / edge))
        if share > self.at[-1]:
            return float(self.grid[-1] - high * np.log((1 - share) / edge))
        return float(np.interp(share, self.at, self.grid))

    def logpdf(self, x: np.ndarray) -> np.ndarray:
        """Log density at x [n]."""
        edge, (low, high) = self.at[0], self.tails
        between = np.log(np.diff(self.at) / np.diff(self.grid))
        inside = between[np.clip(np.searchsorted(self.grid, x, "right") - 1, 0, len(between) - 1)]
        under = np.log(edge / low) - (self.grid[0] - x) / low
        over = np.log(edge / high) - (x - self.grid[-1]) / high
        return np.where(x < self.grid[0], under, np.where(x > self.grid[-1], over, inside))
