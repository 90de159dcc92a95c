"""The closed form of the wide part: a ridge regression of the numbers on the text before them.

There are far more n-grams than numbers, so it is solved in the space of the numbers: with rows f_i of weighted entries,
K = F F^T and targets t, the table without fold k is F^T a with (K_rest + ridge diag(1/weights)) a = t_rest. F has
blocks (`wide_rows`), each with a weight. `fit_spread` fits the log errors likewise. All in float64 on the CPU.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.linalg import inv, solve
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.heads.beside import BesideFit, before_beside
from cqwen_dist.model.ridge import SHARES, around_median
from cqwen_dist.tables.wide.wide_part import MOST, WidePart
from cqwen_dist.tables.wide.wide_rows import (
    WIDTHS,
    LayerRows,
    NamedRows,
    RandomRows,
    TextBefore,
    hashed_rows,
    kernel_of,
    texts_before,
)
from cqwen_dist.tables.wide.wide_size import FOLDS

REACH = 2.0  # of errors that count in full, in median errors
LIMIT = 6.0  # of targets around the median, in half interquartile ranges: 3 loses R2 on wine prices, none loses MAE
SEARCHED = 1024  # numbers used to choose; only the ridge is then chosen again on all
RIDGES = np.logspace(-3, 1, 9)  # in units of the mean diagonal of the words' K
FEW = 500  # numbers: the n-grams of so few texts rarely recur, and one of many candidates is best by chance
LINES, LINES_OF_FEW = (0.1,), (0.1, 1.0)  # the lines' weight in K, relative to the words': docs/decisions.md, D-wide
SURE, SURE_OF_FEW = 1.0, 2.0  # standard errors by which a loss must fall
NUMBERS = (0.01, 0.1, 1.0)  # the numbers' weight, as they count linearly
VALUES = (1.0, 1e4, 1e6)  # the weight of raw values, if used: a sum needs hardly any ridge
LAYERS = (0.1, 0.3, 1.0, 3.0, 10.0)  # the weight of the states of the base's layers, if used
RANDOM = 10.0  # the weight of random features, while the kernel is chosen
RANDOMS = (1.0, 100.0)  # then also tried
STEPS = 2 * len(WIDTHS) + 2  # of progress: kernels, their weight, the fit on all
JUDGES = (0, 1)  # folds for choosing the ridge again
LEAST = 4 * FOLDS
SPREAD_RIDGES = np.logspace(-1, 3, 9)  # in units of K's mean diagonal: logs of single errors are mostly noise
LEAST_ERROR = 0.05  # in median errors: log 0 is undefined
SURE_OF_SPREAD = 2.0


@dataclass(frozen=True)
class WideStart:
    """Fits a wide part, for `model.calibration`. Ranks gather the texts before numbers."""

    part: WidePart
    config: Any  # a `CausalQwenConfig`

    def texts_before(self, batch: Batch, at: Tensor, features: Tensor) -> list[TextBefore]:
        """What `fit` needs from the texts before numbers. at [N]: positions before them, indices into B*T. features
        [N,feature_size]: there."""
        states = before_beside(features, self.part.hidden_size) if self.part.reads else None
        return texts_before(self.part, batch, at, states)

    def fit(self, texts: list[TextBefore], targets: Tensor, progress: Callable[[int, int], None]) -> BesideFit | None:
        """Fit targets [n] (regression's unit) to the texts before them. None if the median is as good."""
        return fit_wide(texts, targets, self.config.wide, self.config.random_features, progress)


_Kernels = tuple[np.ndarray, np.ndarray, np.ndarray]  # of words, lines, numbers; [n,n] each


class _Found(NamedTuple):
    """Out-of-fold Cauchy loss per number [n], with its ridge and shrinkage."""

    losses: np.ndarray
    ridge: float
    share: float

    def beats(self, other: "_Found", sure: float = SURE) -> bool:
        """True if better by more standard errors than chance explains."""
        gain = other.losses - self.losses
        sure = SURE_OF_FEW if len(gain) < FEW else sure
        return bool(gain.mean() > sure * gain.std() / math.sqrt(len(gain)))


@dataclass(frozen=True)
class _Targets:
    """n targets around their median, in units of half their interquartile range, and the inputs of a fit."""

    t: np.ndarray
    held: np.ndarray  # t, outliers limited
    weights: np.ndarray
    folds: np.ndarray

    def of(self, chosen: np.ndarray | slice) -> "_Targets":
        return _Targets(*(getattr(self, name)[chosen] for name in ("t", "held", "weights", "folds")))

    def around_mean(self) -> "_Targets":
        """Targets around their mean. A line through centred values then needs no intercept, which K lacks."""
        mean = float(self.held.mean())
        return replace(self, t=self.t - mean, held=self.held - mean)

    def best(self, kernel: np.ndarray) -> _Found:
        """The ridge and shrinkage with the lowest loss."""
        found = []
        for ridge in RIDGES:
            g, _ = self.left_out(kernel, ridge)
            found += [_Found(np.log1p((self.t - share * g) ** 2), ridge, share) for share in SHARES]
        return min(found, key=lambda one: one.losses.mean())

    def climbed(self, kernel: np.ndarray, found: _Found) -> float:
        """Climb from the ridge in `found` until neither neighbour has a lower loss, on some folds (`kernel` may be
        large).

        If there are as many random features as numbers, a small ridge fits them exactly and predicts badly.
        """

        @cache
        def loss(at: int) -> float:
            g, _ = self.left_out(kernel, RIDGES[at], folds=JUDGES)
            own = np.isin(self.folds, JUDGES)
            return float(np.log1p((self.t - found.share * g)[own] ** 2).mean())

        at = int(np.abs(RIDGES - found.ridge).argmin())
        for step in (1, -1):
            while 0 <= at + step < len(RIDGES) and loss(at + step) < loss(at):
                at += step
        return float(RIDGES[at])

    def left_out(
        self, kernel: np.ndarray, ridge: float, again: bool = False, folds: Iterable[int] = range(FOLDS)
    ) -> tuple[np.ndarray, np.ndarray]:
        """Out-of-fold g [n], and the coefficients a without each fold [FOLDS,n], 0 inside that fold.

        folds: the folds to leave out; g is 0 elsewhere. again: fit twice; the second fit weights
        outliers by the residuals of the first.
        """
        g, solved = np.zeros(len(self.t)), np.zeros((FOLDS, len(self.t)))
        inverse = inv(kernel + np.diag(ridge / self.weights), overwrite_a=True, check_finite=False) if again else None
        for fold in folds:
            own, rest = self.folds == fold, self.folds != fold
            some = self.of(rest) if inverse is None else self.reweighted(inverse, own, rest)
            system = kernel[np.ix_(rest, rest)] + np.diag(ridge / some.weights)
            solved[fold, rest] = solve(system, some.held, assume_a="pos", overwrite_a=True, check_finite=False)
            g[own] = kernel[np.ix_(own, rest)] @ solved[fold, rest]
        return g, solved

    def reweighted(self, inverse: np.ndarray, own: np.ndarray, rest: np.ndarray) -> "_Targets":
        """The targets `rest` [n]; outliers are those from a fit to the others of them (leave-one-out): a step of
        iteratively reweighted least squares. inverse [n,n]: of the system of all targets.

        Errors of the other folds' fits would not do: these know the targets `own`, and so would the weights.
        """
        # The inverse of the rest's own system, by the Schur complement: its diagonal, and a = it times `held`
        held, joint = self.held[rest], inverse[np.ix_(rest, own)]
        along = solve(inverse[np.ix_(own, own)], joint.T, assume_a="pos", check_finite=False).T
        diagonal = inverse.diagonal()[rest] - (joint * along).sum(1)
        a = inverse[np.ix_(rest, rest)] @ held - along @ (joint.T @ held)

        g = held - a / diagonal
        error = self.t[rest] - g
        unit = REACH * max(float(np.median(np.abs(error))), 1e-9)
        weights = 1 / (1 + (error / unit) ** 2)
        return _Targets(self.t[rest], g + error.clip(-LIMIT * unit, LIMIT * unit), weights, self.folds[rest])


def fit_wide(
    texts: Sequence[TextBefore],
    targets: Tensor,
    columns: int,
    random_features: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> BesideFit | None:
    """Fit the tables to targets [n] in the regression's unit. None if g predicts no better than the median.

    Targets are clamped and weighted as in `ridge.robust_ridge`; the fit on all numbers is weighted by the residuals of
    a first fit. Block weights, ridge and shrinkage minimise the out-of-fold Cauchy loss.
    """
    folds = np.array([text.fold for text in texts])
    if len(targets) < LEAST or len(set(folds)) < 2:
        return None
    around, _, unit = around_median(targets.double().cpu())
    t = around.numpy()
    every = _Targets(t, t.clip(-LIMIT, LIMIT), 1 / (1 + t**2), folds)
    words, lines, scaling = hashed_rows(texts, columns)
    kernel = kernel_of(words)
    named = NamedRows.of(texts)
    x, raw = named.linear, named.values  # [n,k] both

    # On some of the numbers
    some = slice(SEARCHED)
    numbers, values = x[some] @ x[some].T, raw[some] @ raw[some].T
    parts = kernel[some, some], kernel_of(lines[some]), numbers
    found, linear, features, times = _search(every.of(some), parts, named.random(random_features), progress)
    rest = _weighted(parts, linear) + (0.0 if features is None else times * (features.x[some] @ features.x[some].T))
    around_mean = every.around_mean()
    further, times_values = _with_block(around_mean.of(some), rest, values, VALUES)
    found, every, of_values = (further, around_mean, times_values) if further.beats(found) else (found, every, 0.0)
    layers, (further, of_layers) = LayerRows.of(texts), (found, 0.0)
    if layers.x.shape[1]:
        block = layers.x[some] @ layers.x[some].T
        further, of_layers = _with_block(around_mean.of(some), rest + of_values * values, block, LAYERS)
    # By more, since without them no base is needed
    taken = further.beats(found, SURE_OF_FEW)
    found, every = (further, around_mean) if taken else (found, every)
    if not found.losses.mean() < np.log1p(t[:SEARCHED] ** 2).mean():
        return None

    # On all
    line, weight = linear
    kernel += line * kernel_of(lines)
    for times_block, block in ((weight, x), (of_values, raw), (of_layers * taken, layers.x)):
        kernel += times_block * (block @ block.T)
    if features is not None:
        kernel += times * (features.x @ features.x.T)
    progress(STEPS - 1, STEPS)
    ridge = found.ridge if len(t) <= SEARCHED else every.climbed(kernel, found)
    left_out, solved = every.left_out(kernel, ridge, again=True)
    spread, of_spread = fit_spread(kernel, every.t - found.share * left_out, folds, SEARCHED)
    unit *= found.share
    both = np.concatenate([unit * solved, of_spread])
    tables = {"weight": both @ (words + line * lines) * scaling}
    tables |= named.tables(weight * (both @ x), of_values * (both @ raw))
    if features is not None:
        tables |= features.tables(times * (both @ features.x))
    if taken:
        tables |= layers.tables(of_layers * (both @ layers.x))
    return BesideFit(
        {name: torch.from_numpy(np.ascontiguousarray(table, np.float32)) for name, table in tables.items()},
        folds.tolist(),
        torch.from_numpy(left_out * unit),
        torch.from_numpy(spread),
    )


def _search(
    some: _Targets, parts: _Kernels, random: Iterator[RandomRows], progress: Callable[[int, int], None]
) -> tuple[_Found, tuple[float, float], RandomRows | None, float]:
    """The fit with the lowest loss: (fit, weights of lines and numbers, random features or None, their weight).

    random: candidate features, for these and further numbers.
    """

    def loss(candidate: tuple[_Found, Any]) -> float:
        return float(candidate[0].losses.mean())

    lines = LINES_OF_FEW if len(some.t) < FEW else LINES
    plain, weights = min(((some.best(_weighted(parts, w)), w) for w in product(lines, NUMBERS)), key=loss)
    linear = _weighted(parts, weights)

    def with_random(rows: RandomRows, times: float) -> tuple[_Found, float]:
        x = rows.x[: len(some.t)]
        return some.best(linear + times * (x @ x.T)), times

    best, features = plain, None
    for tried, rows in enumerate(random):
        progress(tried, STEPS)
        found, _ = with_random(rows, RANDOM)
        if found.beats(plain) and found.losses.mean() < best.losses.mean():
            best, features = found, rows
    if features is None:
        return plain, weights, None, 0.0
    progress(STEPS - 2, STEPS)
    others = [with_random(features, times) for times in RANDOMS]
    best, times = min([(best, RANDOM), *others], key=loss)
    return best, weights, features, times


def _weighted(parts: _Kernels, weights: tuple[float, float]) -> np.ndarray:
    words, lines, numbers = parts
    return words + weights[0] * lines + weights[1] * numbers


def _with_block(some: _Targets, rest: np.ndarray, block: np.ndarray, weights: Iterable[float]) -> tuple[_Found, float]:
    """The fit with the lowest loss that also uses a block, and its weight. rest, block: kernels [n,n].

    Raw values come after random features: a line through distant values is unbounded (concrete: RMSE 4.47, and 4.92 if
    random features are chosen after it).
    """
    found = ((some.best(rest + times * block), times) for times in weights)
    return min(found, key=lambda one: float(one[0].losses.mean()))


def fit_spread(
    kernel: np.ndarray, error: np.ndarray, folds: np.ndarray, searched: int
) -> tuple[np.ndarray, np.ndarray]:
    """The scale of each text: out-of-fold h [n], and the coefficients a of h = K a without each fold [FOLDS,n].

    kernel [n,n], error [n], folds [n] in [0, FOLDS). All 0 if one common scale is as good.

    e_i is the out-of-fold error of the location. log |e| is fitted with the location's kernel K:
    h = K (K + ridge)^-1 (log |e| - its mean). The scale of a number's law is then exp(h) times one constant. (Two
    linear models, of the mean and of the logarithm of the variance: Harvey 1976, "Estimating Regression Models with
    Multiplicative Heteroscedasticity", Econometrica 44.)

    Ridge and shrinkage minimise the out-of-fold Cauchy loss of the first `searched` numbers.
    """
    nothing = np.zeros(len(error)), np.zeros((FOLDS, len(error)))
    middle = float(np.median(np.abs(error)))
    if not middle > 0:
        return nothing
    size = np.abs(error) / middle
    goal = np.log(size.clip(LEAST_ERROR))
    goal -= goal.mean()
    unit = float(kernel.trace()) / len(error)

    every = _Targets(goal, goal, np.ones(len(goal)), folds)
    some = slice(min(searched, len(error)))
    one_scale = _losses(size[some], np.zeros(len(size[some])))
    tried = [(every.of(some).left_out(kernel[some, some], ridge * unit)[0], ridge) for ridge in SPREAD_RIDGES]
    scored = [(_losses(size[some], share * h), ridge, share) for h, ridge in tried for share in SHARES]
    losses, ridge, share = min(scored, key=lambda one: one[0].mean())
    gain = one_scale - losses
    if not gain.mean() > SURE_OF_SPREAD * gain.std() / math.sqrt(len(gain)):
        return nothing
    h, solved = every.left_out(kernel, ridge * unit)
    return (share * h).clip(-MOST, MOST), share * solved


def _losses(size: np.ndarray, h: np.ndarray) -> np.ndarray:
    """Cauchy loss per error [n] (without log pi) at the scale exp(h) times the best constant."""
    h = h.clip(-MOST, MOST)
    relative = size * np.exp(-h)
    constant = max(float(np.median(relative)), 1e-12)
    return np.asarray(h + math.log(constant) + np.log1p((relative / constant) ** 2))
