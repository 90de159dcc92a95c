"""Ridge regressions whose strength is chosen by leave-one-out, in closed form: what the calibrated start fits.

All in float64, on the device of their inputs, by one decomposition of the smaller product (scikit-learn's RidgeCV takes
minutes at p = 3,584). x is [n,p]: n tokens, p dimensions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Tried, in units of the mean over x's dimensions of their squares summed over the tokens.
RIDGES = torch.logspace(-5, 2, 15, dtype=torch.float64)
ROBUST_ROUNDS = 4  # of reweighting: on real numbers the error no longer moves after three
LEAST_SCALE = 0.1  # of the targets' half interquartile range: weights do not follow a few that fit by chance


class RobustFit(NamedTuple):
    """y ~ x @ coefficients + intercept, residuals of Cauchy scale `scale`. left_out [n]: each y told by the others."""

    coefficients: Tensor
    intercept: float
    scale: float
    left_out: Tensor


def ridge_by_leave_one_out(x: Tensor, y: Tensor, intercept: bool = True) -> tuple[Tensor, float]:
    """The ridge regression of y [n] on x [n,p] that tells left-out points best: (coefficients [p], share of variance).

    As scikit-learn's RidgeCV(RIDGES in units of x's mean square sum). Zeros where nothing can be told.
    """
    nothing = torch.zeros_like(x[:1]).sum(0), 0.0
    if len(y) < 3:
        return nothing
    spread = float((y - y.mean()).square().mean())
    if intercept:
        x, y = x - x.mean(0), y - y.mean()
    total = float(x.square().sum())
    if not (0 < total < math.inf and 0 < spread < math.inf):
        return nothing
    parts = _Decomposition.of(x)
    along = parts.scores.T @ y
    best, least = 0.0, math.inf
    for ridge in (RIDGES * total / x.shape[1]).tolist():
        told, own = parts.fitted(along, ridge)
        if intercept:
            own = own + 1 / len(y)  # how much a point tells of itself; the mean's share with it
        error = float(((y - told) / (1 - own)).square().mean())
        if error < least:
            best, least = ridge, error
    return parts.coefficients(along, best), 1 - least / spread


def robust_ridge(x: Tensor, y: Tensor) -> RobustFit:
    """The same for residuals that are Cauchy, by reweighting: wild numbers neither bend it nor choose its strength.

    Where it tells left-out points no better than always the median, it is the median: coefficients 0. n may be 0.
    """
    n, p = x.shape
    zeros = x.new_zeros(p, dtype=torch.float64)
    if n == 0:
        return RobustFit(zeros, 0.0, 1.0, y.double())
    x, y = x.double(), y.double()
    low, middle, high = y.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64, device=y.device)).tolist()
    unit = (high - low) / 2 or float((y - middle).abs().mean()) or 1.0
    t = (y - middle) / unit  # the median at 0, half of all within 1 of it or so
    at_median = RobustFit(zeros, middle, _scale(t) * unit, torch.full_like(y, middle))
    if n < 8 or not bool(x.isfinite().all()):
        return at_median
    worst = float(t.square().log1p().mean())
    weights = 1 / (1 + t.square())
    found = None
    for _ in range(ROBUST_ROUNDS):
        found = _weighted(x, t, weights)
        scale = max(_scale(found.residuals), LEAST_SCALE)
        weights = 1 / (1 + (found.residuals / scale).square())
    assert found is not None
    if not found.loss < worst:
        return at_median
    scale = max(_scale(found.residuals), LEAST_SCALE) * unit
    return RobustFit(found.coefficients * unit, middle + found.intercept * unit, scale, y - found.residuals * unit)


class _Weighted(NamedTuple):
    coefficients: Tensor
    intercept: float
    residuals: Tensor  # [n], each of a fit without that point
    loss: float


def _weighted(x: Tensor, t: Tensor, weights: Tensor) -> _Weighted:
    """A weighted ridge regression, its strength by the Cauchy loss of left-out points."""
    share = weights / weights.sum()
    mean_x, mean_t = share @ x, share @ t
    root = weights.sqrt()
    centred, told = (x - mean_x) * root[:, None], (t - mean_t) * root
    parts = _Decomposition.of(centred)
    along = parts.scores.T @ told
    unit = float(centred.square().sum()) / x.shape[1]
    best: tuple[float, float, Tensor] | None = None
    for ridge in (RIDGES * unit).tolist():
        fitted, own = parts.fitted(along, ridge)
        residuals = (told - fitted) / (1 - own - share).clamp(min=1e-6) / root
        loss = float(residuals.square().log1p().mean())
        if best is None or loss < best[0]:
            best = loss, ridge, residuals
    assert best is not None
    coefficients = parts.coefficients(along, best[1])
    return _Weighted(coefficients, float(mean_t - mean_x @ coefficients), best[2], best[0])


def _scale(residuals: Tensor) -> float:
    """The scale of a Cauchy law around 0, by the median of |residual|."""
    return float(residuals.abs().median()) or 1.0


class _Decomposition(NamedTuple):
    """x = scores @ directions^T with orthogonal scores; `values` are their squared lengths."""

    x: Tensor
    values: Tensor
    vectors: Tensor
    scores: Tensor

    @classmethod
    def of(cls, x: Tensor) -> _Decomposition:
        n, p = x.shape
        values, vectors = torch.linalg.eigh(x.T @ x if n > p else x @ x.T)
        values = values.clamp(min=0)
        return cls(x, values, vectors, x @ vectors if n > p else vectors * values.sqrt())

    def fitted(self, along: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
        """(fitted values [n], how much each point tells of itself [n]) at a ridge; along = scores^T y."""
        shrunk = 1 / (self.values + ridge)
        return self.scores @ (shrunk * along), self.scores.square() @ shrunk

    def coefficients(self, along: Tensor, ridge: float) -> Tensor:
        """[p] at a ridge."""
        if self.x.shape[0] > self.x.shape[1]:
            return self.vectors @ (along / (self.values + ridge))
        of_vectors = along / self.values.sqrt().clamp(min=1e-150)  # vectors^T y; 0 where x has no extent
        return self.x.T @ (self.vectors @ (of_vectors / (self.values + ridge)))
