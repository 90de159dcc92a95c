"""Ridge regressions whose strength is chosen by leave-one-out in closed form, for the calibrated start.

All in float64, on the device of their inputs, by one decomposition of the smaller product (scikit-learn's RidgeCV takes
minutes at p = 3,584). x is [n,p]: n tokens, p dimensions.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.parallel.collectives import sum_over
from cqwen_dist.parallel.groups import Groups

# Candidates, in units of the mean over x's dimensions of their squares summed over the tokens.
RIDGES = torch.logspace(-5, 2, 15, dtype=torch.float64)
# For `robust_ridge`, in units of half the targets' interquartile range. On GSM8K's numbers and SmolLM2 (484 to fit, 387
# of other texts) the median error is 10.2; 13.6 without weights, 10.4 without a limit, 13 always predicting the median.
LIMIT = 3.0
LEAST_SCALE = 0.1
FOLDS = 8
SHARES = (1.0, 0.75, 0.5, 0.25)  # shrinkage: how far from the median a prediction goes


class RobustFit(NamedTuple):
    """y ~ x @ coefficients + intercept."""

    coefficients: Tensor  # [p]
    intercept: float
    scale: float  # Cauchy scale of the residuals
    left_out: Tensor  # [n] each y as the other folds predict it


def ridges_by_leave_one_out(x: Tensor, y: Tensor, intercept: bool = True) -> tuple[Tensor, Tensor]:
    """The ridge regressions of each column of y [n,m] on x [n,p] of least leave-one-out error, by one decomposition:
    (coefficients [m,p], shares of variance [m]). As scikit-learn's RidgeCV. Zeros if no column of x predicts y's."""
    n, p = x.shape
    found, shares = x.new_zeros(y.shape[1], p), y.new_zeros(y.shape[1])
    spread = (y - y.mean(0)).square().mean(0)
    if intercept:
        x, y = x - x.mean(0), y - y.mean(0)
    total = float(x.square().sum())
    if n < 3 or not 0 < total < math.inf:
        return found, shares
    parts = _Decomposition.of(x)
    along = parts.scores.T @ y
    shrunk = 1 / (parts.values[:, None] + RIDGES.to(x) * total / p)  # [p, ridges]
    # A point's leverage; with an intercept also its share in the mean
    own = parts.scores.square() @ shrunk + (1 / n if intercept else 0.0)
    for i in range(y.shape[1]):
        errors = ((y[:, i, None] - parts.scores @ (shrunk * along[:, i, None])) / (1 - own)).square().mean(0)
        errors = errors.nan_to_num(math.inf)  # 0/0 where a ridge fits all points
        if 0 < float(spread[i]) < math.inf and float(errors.min()) < math.inf:
            found[i] = parts.coefficients(along[:, i], float(RIDGES[errors.argmin()]) * total / p)
            shares[i] = 1 - errors.min() / spread[i]
    return found, shares


def robust_ridge(x: Tensor, y: Tensor, folds: Tensor | None = None, sure: float = 0.0) -> RobustFit:
    """A ridge regression of y [n] on x [n,p] for Cauchy residuals: outliers hardly change it.

    Targets t are distances from the median, in units of half the interquartile range. They are clamped to `LIMIT` and
    weighted by 1/(1 + t^2). The ridge and a further shrinkage to the median are chosen by the Cauchy loss on folds left
    out, among those whose median error is at most that of predicting the median. If the best of these does not have a
    loss smaller by `sure` standard errors, the median is the answer, with coefficients 0. folds [n] int64 in
    [0, FOLDS): dependent points, such as numbers of one text, share a fold (default: consecutive eighths).
    """
    n, p = x.shape
    zeros = torch.zeros(p, dtype=torch.float64, device=x.device)
    x, y = x.double(), y.double()
    if n == 0:
        return RobustFit(zeros, 0.0, 1.0, y)

    # Targets t, and the answer without a regression
    t, middle, unit = around_median(y)
    at_median = RobustFit(zeros, middle, _scale(t) * unit, torch.full_like(y, middle))
    if n < 2 * FOLDS or not bool(x.isfinite().all()):
        return at_median
    if folds is None:
        folds = torch.arange(n, device=x.device) * FOLDS // n
    if bool((folds == folds[0]).all()):
        return at_median

    # Predictions by the other folds, for every ridge
    clamped, weights = t.clamp(-LIMIT, LIMIT), 1 / (1 + t.square())
    held_out = t.new_zeros(len(RIDGES), n)
    for fold in folds.unique():
        rest, fold = folds != fold, folds == fold
        for i, (coefficients, intercept) in enumerate(_weighted(x[rest], clamped[rest], weights[rest], RIDGES)):
            held_out[i, fold] = x[fold] @ coefficients + intercept

    # The best shrinkage and ridge, fitted to all points
    shares = torch.tensor(SHARES, dtype=torch.float64, device=x.device)
    residuals = t - shares[:, None, None] * held_out  # [shares, ridges, n]
    each, errors = residuals.square().log1p(), residuals.abs().median(-1).values
    losses = each.mean(-1)
    losses[errors > t.abs().median()] = math.inf
    share, ridge = divmod(int(losses.argmin()), len(RIDGES))
    gain = t.square().log1p() - each[share, ridge]
    if not float(losses.min()) < math.inf or not float(gain.mean()) > sure * float(gain.std()) / math.sqrt(n):
        return at_median
    left_out, factor = SHARES[share] * held_out[ridge], SHARES[share] * unit
    ((coefficients, intercept),) = _weighted(x, clamped, weights, RIDGES[ridge : ridge + 1])
    scale = _scale(t - left_out) * unit
    return RobustFit(coefficients * factor, middle + intercept * factor, scale, middle + unit * left_out)


def around_median(y: Tensor) -> tuple[Tensor, float, float]:
    """((y - median) / unit, median, unit) of y [n] float64. The unit: half the interquartile range, else the mean
    deviation from the median, else 1."""
    low, middle, high = y.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64, device=y.device)).tolist()
    unit = (high - low) / 2 or float((y - middle).abs().mean()) or 1.0
    return (y - middle) / unit, middle, unit


def _weighted(x: Tensor, t: Tensor, weights: Tensor, ridges: Tensor) -> list[tuple[Tensor, float]]:
    """(coefficients, intercept) of a weighted ridge regression for each of some ridges, in RIDGES' units."""
    share = weights / weights.sum()
    mean_x, mean_t = share @ x, share @ t
    root = weights.sqrt()
    centred = (x - mean_x) * root[:, None]
    parts = _Decomposition.of(centred)
    along = parts.scores.T @ ((t - mean_t) * root)
    unit = float(centred.square().sum()) / x.shape[1]
    found = [parts.coefficients(along, ridge * unit) for ridge in ridges.tolist()]
    return [(coefficients, float(mean_t - mean_x @ coefficients)) for coefficients in found]


def _scale(residuals: Tensor) -> float:
    """The scale of a Cauchy law around 0, by the median of |residual|; at least `LEAST_SCALE`."""
    return max(float(residuals.abs().median()), LEAST_SCALE)


class _Decomposition(NamedTuple):
    """x = scores @ directions^T with orthogonal scores; `values` are their squared lengths."""

    x: Tensor
    values: Tensor
    vectors: Tensor
    scores: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "_Decomposition":
        n, p = x.shape
        values, vectors = torch.linalg.eigh(x.T @ x if n > p else x @ x.T)
        values = values.clamp(min=0)
        return cls(x, values, vectors, x @ vectors if n > p else vectors * values.sqrt())

    def coefficients(self, along: Tensor, ridge: float) -> Tensor:
        """[p] at a ridge."""
        if self.x.shape[0] > self.x.shape[1]:
            return self.vectors @ (along / (self.values + ridge))
        of_vectors = along / self.values.sqrt().clamp(min=1e-150)  # vectors^T y; 0 where x has no extent
        return self.x.T @ (self.vectors @ (of_vectors / (self.values + ridge)))


def fold_of_row(batch: Batch, groups: Groups) -> Tensor:
    """[B] in [0, FOLDS): a hash of the row's tokens, so that the folds are the same on any number of ranks.

    Collective over the sequence group, whose ranks have parts of the row.
    """
    width = batch.input_ids.shape[1]
    places = torch.arange(1, width + 1, device=batch.input_ids.device) + groups.sequence_rank * width
    key = (batch.input_ids * batch.attention_mask * places).sum(1)
    if groups.sequence is not None:
        sum_over(key, groups.sequence)
    return (key * 2_654_435_761 % 2**32) * FOLDS // 2**32  # Knuth's multiplicative hash: its high bits are even
