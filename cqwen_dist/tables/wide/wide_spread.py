"""The wide part's scale for each text: a ridge regression on the log errors, in closed form.

e_i is the out-of-fold error of the location. log |e| is fitted with the location's kernel K:
h = K (K + ridge)^-1 (log |e| - its mean). The scale of a number's law is then exp(h) times one constant. (Two linear
models, of the mean and of the logarithm of the variance: Harvey 1976, "Estimating Regression Models with
Multiplicative Heteroscedasticity", Econometrica 44.) All in float64 on the CPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve

from cqwen_dist.model.ridge import SHARES
from cqwen_dist.tables.wide.wide_part import MOST
from cqwen_dist.tables.wide.wide_size import FOLDS

RIDGES = np.logspace(-1, 3, 9)  # in units of K's mean diagonal: logs of single errors are mostly noise
LEAST = 0.05  # floor of an error, in median errors: log 0 is undefined
SURE = 2.0  # the loss must fall by this number of standard errors


class SpreadFit(NamedTuple):
    """Out-of-fold h [n], and per fold left out the coefficients a of h = K a [FOLDS,n]."""

    left_out: np.ndarray
    solved: np.ndarray


def fit_spread(kernel: np.ndarray, error: np.ndarray, folds: np.ndarray, searched: int) -> SpreadFit:
    """kernel [n,n], error [n], folds [n] in [0, FOLDS). All 0 if one common scale is as good.

    Ridge and shrinkage minimise the out-of-fold Cauchy loss of the first `searched` numbers.
    """
    nothing = SpreadFit(np.zeros(len(error)), np.zeros((FOLDS, len(error))))
    middle = float(np.median(np.abs(error)))
    if not middle > 0:
        return nothing
    size = np.abs(error) / middle
    goal = np.log(size.clip(LEAST))
    goal -= goal.mean()
    unit = float(kernel.trace()) / len(error)

    def fit(ridge: float, some: slice) -> SpreadFit:
        own_goal, own_folds = goal[some], folds[some]
        h, solved = np.zeros(len(own_goal)), np.zeros((FOLDS, len(own_goal)))
        for fold in range(FOLDS):
            own, rest = own_folds == fold, own_folds != fold
            system = kernel[some, some][np.ix_(rest, rest)] + ridge * unit * np.eye(int(rest.sum()))
            solved[fold, rest] = solve(system, own_goal[rest], assume_a="pos", overwrite_a=True, check_finite=False)
            h[own] = kernel[some, some][np.ix_(own, rest)] @ solved[fold, rest]
        return SpreadFit(h, solved)

    some = slice(min(searched, len(error)))
    one_scale = _losses(size[some], np.zeros(len(size[some])))
    tried = [(fit(ridge, some).left_out, ridge) for ridge in RIDGES]
    scored = [(_losses(size[some], share * h), ridge, share) for h, ridge in tried for share in SHARES]
    losses, ridge, share = min(scored, key=lambda one: one[0].mean())
    gain = one_scale - losses
    if not gain.mean() > SURE * gain.std() / math.sqrt(len(gain)):
        return nothing
    found = fit(ridge, slice(None))
    return SpreadFit((share * found.left_out).clip(-MOST, MOST), share * found.solved)


def _losses(size: np.ndarray, h: np.ndarray) -> np.ndarray:
    """Cauchy loss per error [n] (without log pi) at the scale exp(h) times the best constant."""
    h = h.clip(-MOST, MOST)
    relative = size * np.exp(-h)
    constant = max(float(np.median(relative)), 1e-12)
    return np.asarray(h + math.log(constant) + np.log1p((relative / constant) ** 2))
