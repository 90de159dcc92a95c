"""How predicted laws of numbers are scored, every model's alike."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

import numpy as np

from cqwen_dist.intervals import LEVELS
from cqwen_dist.tables.fitting import errors, intervals

QUANTILES = sorted([0.5, *((1 - level) / 2 for level in LEVELS), *((1 + level) / 2 for level in LEVELS)])
LAWS = {"Cauchy": "cauchy", "Laplace": "laplace", "Student t": "t", "Gauss": "norm"}


@dataclass(frozen=True)
class Predicted:
    """A model's laws of n numbers: quantiles [n,7] at `QUANTILES`, and log_density [n] of what came true, if known."""

    quantiles: np.ndarray
    log_density: np.ndarray | None = None

    @classmethod
    def normal(cls, middle: np.ndarray, spread: np.ndarray | float, truth: np.ndarray) -> Predicted:
        """Of normal laws: middle [n], spread [n] or one for all, truth [n]."""
        from scipy.stats import norm

        wide = np.broadcast_to(spread, middle.shape)
        return cls(middle[:, None] + wide[:, None] * norm.ppf(QUANTILES), norm.logpdf(truth, middle, wide))

    @classmethod
    def cauchy(cls, quantiles: np.ndarray, truth: np.ndarray, by_log: bool) -> Predicted:
        """Of Cauchy laws that have the median and the quartiles of quantiles [n,7], which have six digits; truth [n].

        by_log: the laws are those of sign(v) ln(1 + |v|).
        """
        from scipy.stats import cauchy

        def unit(values: np.ndarray) -> np.ndarray:
            return np.sign(values) * np.log1p(np.abs(values)) if by_log else values

        low, middle, high = (unit(quantiles[:, QUANTILES.index(at)]) for at in (0.25, 0.5, 0.75))
        scale = np.maximum((high - low) / 2, 1e-6 * np.abs(middle).clip(min=1e-6))
        density = cauchy.logpdf(unit(truth), middle, scale)
        return cls(quantiles, density - np.log1p(np.abs(truth)) if by_log else density)

    def of(self, rows: np.ndarray) -> Predicted:
        """Those of some rows [m]."""
        return Predicted(self.quantiles[rows], None if self.log_density is None else self.log_density[rows])

    def scores(self, truth: np.ndarray) -> dict[str, float]:
        """Scores by truth [n]; without an interval where every law is a point.

        crps: 2 int pinball(level) d level, each quantile for the levels next to it; of a point the absolute error.
        """
        middle = self.quantiles[:, len(LEVELS)]
        levels = np.array(QUANTILES)
        between = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
        error = truth[:, None] - self.quantiles
        pinball = np.maximum(levels * error, (levels - 1) * error)
        ends = [QUANTILES.index(at) for at in ((1 - 0.9) / 2, (1 + 0.9) / 2)]
        further = {} if self.log_density is None else {"log_likelihood": float(self.log_density.mean())}
        if np.ptp(self.quantiles, axis=1).any():
            further |= intervals(self.quantiles[:, ends], truth)
        return {
            **errors(middle, truth),
            "crps": 2 * float((pinball @ np.diff(between)).mean()),
            **further,
            "exact": float((np.abs(middle - truth) < 0.5).mean()),
            "relative": float(np.median(np.abs(middle - truth) / np.abs(truth).clip(min=1e-9))),
        }


def laws(error: np.ndarray) -> dict[str, dict[str, float]]:
    """Each law's mean log likelihood of the errors [n], and the share of them in its 90 % interval.

    It is fitted to one half and measured on the other, and the other way round.
    """
    from scipy import stats

    order = np.random.default_rng(0).permutation(len(error))
    halves = error[order[::2]], error[order[1::2]]
    found = {}
    for name, law in LAWS.items():
        both = [(getattr(stats, law), getattr(stats, law).fit(own), other) for own, other in (halves, halves[::-1])]
        inside = [np.mean((law.ppf(0.05, *at) <= e) & (e <= law.ppf(0.95, *at))) for law, at, e in both]
        found[name] = {
            "log_likelihood": mean(float(law.logpdf(e, *at).mean()) for law, at, e in both),
            "coverage_90": float(np.mean(inside)),
        }
    return found
