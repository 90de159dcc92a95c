"""The closed form of the wide part: a ridge regression of the numbers on the text before them.

With far more n-grams than numbers it is solved in the numbers' own space: with rows f_i of weighted entries,
K = F F^T and targets t, the table without fold k is F^T a with (K_rest + ridge diag(1/weights)) a = t_rest. F has three
parts, each of mean square 1 a row and with a weight of its own:
- words: an n-gram that m of n texts hold weighs the square root of its idf ln((1+n)/(1+m)) + 1
- values by their names, centred and brought to variance 1
- random features of these values together (`model.random_features`)
What it leaves is then explained in the same way (`model.wide_spread`). All in float64 on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg import inv, solve
from scipy.sparse import csr_matrix, diags
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.model.random_features import NAMES, bytes_of
from cqwen_dist.model.ridge import SHARES, around_median
from cqwen_dist.model.wide import FOLDS, WidePart, fold_of
from cqwen_dist.model.wide_spread import fit_spread

REACH = 2.0  # of errors that count in full, in median errors
LIMIT = 6.0  # of targets around the median, in half interquartile ranges: 3 loses R2 on wine prices, none loses MAE
SEARCHED = 1024  # numbers to choose by; only the ridge is then chosen anew on all
RIDGES = np.logspace(-3, 1, 9)  # in units of the mean of K's diagonal, of words alone
VALUE_WEIGHTS = (0.01, 0.1, 1.0)  # of the values' part of K, relative to the words'
RANDOM_WEIGHT = 10.0  # of the random features' part, while their kernel is chosen
RANDOM_WEIGHTS = (1.0, 100.0)  # then also tried
WIDTHS = (0.25, 0.5, 0.7, 1.0, 2.0)  # of their kernel, in units of a row's root mean square distance from the mean
STEPS = 2 * len(WIDTHS) + 2  # of progress: kernels, their weight, the fit on all
JUDGES = (0, 1)  # folds by which the ridge is chosen anew
COMMON = 0.05  # share of texts that hold a name, for random features to read it
LEAST = 4 * FOLDS
LEAST_SPREAD = 1e-4  # of phi: below it a value is a constant


class TextBefore(NamedTuple):
    """The text before a number: its entries, columns and factors [m] each, and its fold."""

    columns: np.ndarray
    factors: np.ndarray
    fold: int


class WideFit(NamedTuple):
    """The wide part's tables by name, fp32; of each number, by the tables without its fold, g and h [n] float64."""

    tables: dict[str, Tensor]
    left_out: Tensor
    spread: Tensor


class _Found(NamedTuple):
    """The Cauchy loss of each number when its fold is left out [n]; ridge and shrinkage."""

    losses: np.ndarray
    ridge: float
    share: float

    def beats(self, other: _Found) -> bool:
        """By more than one standard error: so many candidates would otherwise fit the noise of some hundred numbers."""
        gain = other.losses - self.losses
        return bool(gain.mean() > gain.std() / math.sqrt(len(gain)))


@dataclass(frozen=True)
class _Targets:
    """n targets around their median, in units of half their interquartile range, and what a fit of them needs."""

    t: np.ndarray
    held: np.ndarray  # t, outliers limited
    weights: np.ndarray
    folds: np.ndarray

    def of(self, chosen: np.ndarray | slice) -> _Targets:
        return _Targets(*(getattr(self, name)[chosen] for name in ("t", "held", "weights", "folds")))

    def best(self, kernel: np.ndarray) -> _Found:
        """The ridge and shrinkage of the least loss."""
        found = []
        for ridge in RIDGES:
            g, _ = self.left_out(kernel, ridge)
            found += [_Found(np.log1p((self.t - share * g) ** 2), ridge, share) for share in SHARES]
        return min(found, key=lambda one: one.losses.mean())

    def climbed(self, kernel: np.ndarray, found: _Found) -> float:
        """The ridge where a neighbour's loss is no less, from that of `found`; by some folds, as `kernel` may be large.

        As many numbers as random features are fitted exactly by a small ridge, and badly: more of them need a larger.
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
        """(g of each number without its fold [n], a of each fold left out [FOLDS,n], 0 at its own).

        folds: those that are left out; g is 0 elsewhere. again: each fit is followed by another, for which outliers are
        those from the first.
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

    def reweighted(self, inverse: np.ndarray, own: np.ndarray, rest: np.ndarray) -> _Targets:
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


def texts_before(wide: WidePart, batch: Batch, at: Tensor) -> list[TextBefore]:
    """The texts before numbers. at [N]: the positions that the numbers follow, indices into the flattened [B,T]."""
    found = wide.entries(batch.input_ids, batch.numeric_values, batch.position_ids)
    folds, begins = fold_of(found.text).flatten()[at].tolist(), found.begin.clamp(min=0).flatten()[at].tolist()
    columns, factors = found.columns.cpu().numpy(), found.factors.cpu().numpy()
    texts = []
    for place, first, fold in zip(at.tolist(), begins, folds, strict=True):
        row, last = divmod(place, batch.input_ids.shape[1])
        text = slice(first, last + 1)
        held = factors[row, text] != 0
        texts.append(TextBefore(columns[row, text][held], factors[row, text][held], fold))
    return texts


def fit_wide(
    texts: Sequence[TextBefore],
    targets: Tensor,
    columns: int,
    random_features: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> WideFit | None:
    """Fit the tables to targets [n], in the regression's unit; None where g predicts no better than the median.

    Targets are clamped and weighted as `ridge.robust_ridge` does; on all numbers then by what a first fit leaves. The
    parts' weights, the ridge and a shrinkage have the least Cauchy loss on the folds left out.
    """
    folds = np.array([text.fold for text in texts])
    if len(targets) < LEAST or len(set(folds)) < 2:
        return None
    around, _, unit = around_median(targets.double().cpu())
    t = around.numpy()
    every = _Targets(t, t.clip(-LIMIT, LIMIT), 1 / (1 + t**2), folds)
    counts = _counts(texts, columns)
    scaling, (words, values) = _parts(counts, _scaling(counts))

    # On some of the numbers
    random = _random_rows(counts, random_features)
    kernels = [_kernel(part[:SEARCHED]) for part in (words, values)]
    found, weight, features, times = _search(every.of(slice(SEARCHED)), kernels, random, progress)
    if not found.losses.mean() < np.log1p(t[:SEARCHED] ** 2).mean():
        return None

    # On all
    kernel = _kernel(words) + weight * _kernel(values)
    if features is not None:
        kernel += times * (features.x @ features.x.T)
    progress(STEPS - 1, STEPS)
    ridge = found.ridge if len(t) <= SEARCHED else every.climbed(kernel, found)
    left_out, solved = every.left_out(kernel, ridge, again=True)
    spread = fit_spread(kernel, t - found.share * left_out, folds, SEARCHED)
    unit *= found.share
    both = np.concatenate([unit * solved, spread.solved])
    tables = {"weight": (scaling @ ((words + weight * values).T @ both.T)).T}
    if features is not None:
        tables |= features.tables(times * (both @ features.x))
    return WideFit(
        {name: torch.from_numpy(np.ascontiguousarray(table, np.float32)) for name, table in tables.items()},
        torch.from_numpy(left_out * unit),
        torch.from_numpy(spread.left_out),
    )


def _search(
    some: _Targets, kernels: Sequence[np.ndarray], random: Iterator[_RandomRows], progress: Callable[[int, int], None]
) -> tuple[_Found, float, _RandomRows | None, float]:
    """The fit of least loss: (it, weight of the values' part, random features or None, their weight).

    kernels: of the words' and of the values' part [n,n]. random: candidates, of these and further numbers.
    """
    words, values = kernels
    linear = [(some.best(words + weight * values), weight) for weight in VALUE_WEIGHTS]
    plain, weight = min(linear, key=lambda one: one[0].losses.mean())

    def with_random(rows: _RandomRows, times: float) -> _Found:
        x = rows.x[: len(some.t)]
        return some.best(words + weight * values + times * (x @ x.T))

    best, features = plain, None
    for tried, rows in enumerate(random):
        progress(tried, STEPS)
        found = with_random(rows, RANDOM_WEIGHT)
        if found.beats(plain) and found.losses.mean() < best.losses.mean():
            best, features = found, rows
    if features is None:
        return plain, weight, None, 0.0
    progress(STEPS - 2, STEPS)
    weighted = [(best, RANDOM_WEIGHT), *((with_random(features, times), times) for times in RANDOM_WEIGHTS)]
    best, times = min(weighted, key=lambda one: one[0].losses.mean())
    return best, weight, features, times


@dataclass(frozen=True)
class _RandomRows:
    """Random features of n texts, and what gives them: names' columns [k], centres, slopes [k], frequencies [k,D],
    offsets [D]."""

    x: np.ndarray  # [n,D], of mean square 1 a row
    columns: np.ndarray
    centre: np.ndarray
    slope: np.ndarray
    frequencies: np.ndarray
    offsets: np.ndarray

    def tables(self, weight: np.ndarray) -> dict[str, np.ndarray]:
        """weight [tables,D] of x -> the tables of `RandomFeatures`, as the wide part names them."""
        spare = [0, NAMES - len(self.columns)]
        found = {
            "names": np.pad(bytes_of(torch.from_numpy(self.columns)), [spare, [0, 0]]),
            "centre": np.pad(self.centre, spare),
            "slope": np.pad(self.slope, spare),
            "frequencies": np.pad(self.frequencies, [spare, [0, 0]]),
            "offsets": self.offsets,
            "weight": weight * np.sqrt(2 / len(self.offsets)),
        }
        return {f"random.{name}": table for name, table in found.items()}


def _random_rows(counts: csr_matrix, count: int) -> Iterator[_RandomRows]:
    """Candidates: normal frequencies have the kernel exp(-d^2 / 2), Laplace's the product of 1 / (1 + d_k^2)."""
    values, mean, spread = _moments(counts)
    held = counts[:, values + 1].getnnz(0)
    known = np.flatnonzero((held >= max(LEAST, COMMON * counts.shape[0])) & (spread > LEAST_SPREAD))
    known = known[np.argsort(-held[known], kind="stable")][:NAMES]
    if not count or not len(known):
        return
    at, centre, slope = values[known], mean[known], 1 / spread[known]
    x = (counts[:, at].toarray() - counts[:, at + 1].toarray() * centre) * slope
    distance = np.sqrt(np.square(x).sum(1).mean())
    draw = np.random.default_rng(0)
    offsets = draw.uniform(0, 2 * np.pi, count)
    for drawn in (draw.standard_normal((len(known), count)), draw.laplace(size=(len(known), count))):
        for width in WIDTHS:
            frequencies = drawn / (width * distance)
            features = np.cos(x @ frequencies + offsets) * np.sqrt(2 / count)
            yield _RandomRows(features, at, centre, slope, frequencies, offsets)


def _counts(texts: Sequence[TextBefore], columns: int) -> csr_matrix:
    """[n,columns]: each text's entries, those of one column added."""
    places, factors, _ = zip(*texts, strict=True)
    ends = np.cumsum([0, *map(len, places)])
    entries = np.concatenate(factors), np.concatenate(places), ends
    found = csr_matrix(entries, (len(texts), columns), dtype=np.float64)
    found.sum_duplicates()
    return found


def _scaling(counts: csr_matrix) -> csr_matrix:
    """[columns,columns]: idf on the diagonal; a value's column is centred by the next column, to variance 1."""
    n, columns = counts.shape
    held = np.bincount(counts.indices, minlength=columns)
    idf = np.sqrt(np.log((1 + n) / (1 + held)) + 1)
    values, mean, spread = _moments(counts)
    factor = np.divide(idf[values], spread, out=np.zeros_like(spread), where=spread > LEAST_SPREAD)
    diagonal = idf.copy()
    diagonal[values] = factor
    at = np.arange(columns)
    entries = np.concatenate([diagonal, -factor * mean])
    places = np.concatenate([at, values + 1]), np.concatenate([at, values])
    return csr_matrix((entries, places), (columns, columns))


def _moments(counts: csr_matrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(value columns, the mean and the standard deviation of phi in each)."""
    values = np.arange(counts.shape[1] // 2, counts.shape[1], 2)
    number = np.asarray(counts[:, values + 1].sum(0))[0].clip(min=1)
    sums = counts[:, values]
    mean = np.asarray(sums.sum(0))[0] / number
    return values, mean, np.sqrt((np.asarray(sums.multiply(sums).sum(0))[0] / number - mean**2).clip(min=0))


def _parts(counts: csr_matrix, scaling: csr_matrix) -> tuple[csr_matrix, list[csr_matrix]]:
    """The scaling with which both the words and the values of a row have mean square 1; rows of words, of values."""
    n, columns = counts.shape
    is_value = np.zeros(columns)
    is_value[columns // 2 :: 2] = 1
    rows = counts @ scaling
    squares = np.asarray(rows.multiply(rows).sum(0))[0]
    sizes = [np.sqrt(max(squares @ mask / n, 1e-12)) for mask in (1 - is_value, is_value)]
    scaling = csr_matrix(scaling @ diags((1 - is_value) / sizes[0] + is_value / sizes[1]))
    rows = counts @ scaling
    return scaling, [csr_matrix(rows @ diags(mask)) for mask in (1 - is_value, is_value)]


def _kernel(rows: csr_matrix) -> np.ndarray:
    """F F^T [n,n]. Columns that many texts share are multiplied as dense ones."""
    held = np.bincount(rows.indices, minlength=rows.shape[1])
    common = held > rows.shape[0] // 8
    dense = rows[:, common].toarray()
    rare = rows[:, ~common]
    return dense @ dense.T + (rare @ rare.T).toarray()
