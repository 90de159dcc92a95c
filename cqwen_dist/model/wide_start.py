"""The closed form of the wide part: a ridge regression of the numbers on the n-grams of the text before them.

With far more n-grams than numbers it is solved in the numbers' own space: with rows f_i of weighted entries,
K = F F^T and targets t, the table without fold k is F^T a with (K_rest + ridge diag(1/weights)) a = t_rest. An n-gram
that m of n texts hold weighs the square root of its idf ln((1+n)/(1+m)) + 1 in F; values are first centred and brought
to variance 1. All in float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.linalg import solve
from scipy.sparse import csr_matrix, diags
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.model.ridge import SHARES, around_median
from cqwen_dist.model.wide import FOLDS, WidePart, fold_of

LIMIT = 6.0  # of targets around the median, in half interquartile ranges: 3 loses R2 on wine prices, none loses MAE
SEARCHED = 1024  # numbers to choose by
RIDGES = np.logspace(-3, 1, 9)  # in units of the mean of K's diagonal, of words alone
VALUE_WEIGHTS = (0.01, 0.1, 1.0)  # of the values' part of K beside the words'
LEAST = 4 * FOLDS
LEAST_SPREAD = 1e-4  # of phi: below it a value is a constant


class TextBefore(NamedTuple):
    """The text before a number: its entries, columns and factors [m] each, and its fold."""

    columns: np.ndarray
    factors: np.ndarray
    fold: int


class WideFit(NamedTuple):
    """The tables [FOLDS,columns] fp32, and g of each number by the table that its fold had no part in, [n] float64."""

    weight: Tensor
    left_out: Tensor


def texts_before(wide: WidePart, batch: Batch, at: Tensor) -> list[TextBefore]:
    """Of the positions `at` [N] that numbers follow, indices into the flattened [B,T]."""
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


def fit_wide(texts: Sequence[TextBefore], targets: Tensor, columns: int) -> WideFit | None:
    """Fit the tables to targets [n], in the regression's unit; None where that predicts no better than the median.

    Targets are clamped and weighted as `ridge.robust_ridge` does. The ridge and a shrinkage have the least Cauchy loss
    on the folds left out.
    """
    folds = np.array([text.fold for text in texts])
    if len(targets) < LEAST or len(set(folds)) < 2:
        return None
    around, _, unit = around_median(targets.double().cpu())
    t = around.numpy()
    held, weights = t.clip(-LIMIT, LIMIT), 1 / (1 + t**2)
    counts = _counts(texts, columns)
    scaling, parts = _parts(counts, _scaling(counts))
    kernels = [_kernel(part) for part in parts]

    # Weight of the values' part, ridge and shrinkage, on some of the numbers
    some = slice(0, SEARCHED)
    found = []
    for weight in VALUE_WEIGHTS:
        kernel = _joined([of_part[some, some] for of_part in kernels], weight)
        for ridge in RIDGES:
            g, _ = _left_out(kernel, held[some], weights[some], folds[some], ridge)
            found += [(np.log1p((t[some] - share * g) ** 2).mean(), weight, ridge, share * unit) for share in SHARES]
    loss, weight, ridge, factor = min(found)
    if not loss < np.log1p(t[some] ** 2).mean():
        return None

    # The tables, on all
    left_out, solved = _left_out(_joined(kernels, weight), held, weights, folds, ridge)
    tables = (scaling @ (_joined(parts, weight).T @ solved.T)).T * factor
    return WideFit(
        torch.from_numpy(np.ascontiguousarray(tables, dtype=np.float32)), torch.from_numpy(left_out * factor)
    )


def _joined(parts: Sequence[Any], weight: float) -> Any:
    """Of words and values, rows or kernels: the values' part with this weight."""
    return parts[0] + weight * parts[1]


def _counts(texts: Sequence[TextBefore], columns: int) -> csr_matrix:
    """[n,columns]: each text's entries, those of one column added."""
    places, factors, _ = zip(*texts, strict=True)
    ends = np.cumsum([0, *map(len, places)])
    entries = np.concatenate(factors), np.concatenate(places), ends
    found = csr_matrix(entries, (len(texts), columns), dtype=np.float64)
    found.sum_duplicates()
    return found


def _scaling(counts: csr_matrix) -> csr_matrix:
    """[columns,columns]: idf on the diagonal; a value's column is centred by the column beside it, to variance 1."""
    n, columns = counts.shape
    held = np.bincount(counts.indices, minlength=columns)
    idf = np.sqrt(np.log((1 + n) / (1 + held)) + 1)
    values = np.arange(columns // 2, columns, 2)
    number = np.asarray(counts[:, values + 1].sum(0))[0].clip(min=1)
    signed = counts[:, values]
    mean = np.asarray(signed.sum(0))[0] / number
    spread = np.sqrt((np.asarray(signed.multiply(signed).sum(0))[0] / number - mean**2).clip(min=0))
    factor = np.divide(idf[values], spread, out=np.zeros_like(spread), where=spread > LEAST_SPREAD)
    diagonal = idf.copy()
    diagonal[values] = factor
    at = np.arange(columns)
    entries = np.concatenate([diagonal, -factor * mean])
    places = np.concatenate([at, values + 1]), np.concatenate([at, values])
    return csr_matrix((entries, places), (columns, columns))


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


def _left_out(
    kernel: np.ndarray, t: np.ndarray, weights: np.ndarray, folds: np.ndarray, ridge: float
) -> tuple[np.ndarray, np.ndarray]:
    """(g of each number without its fold [n], a of each fold left out [FOLDS,n], 0 at its own)."""
    g, solved = np.zeros(len(t)), np.zeros((FOLDS, len(t)))
    for fold in range(FOLDS):
        own, rest = folds == fold, folds != fold
        system = kernel[np.ix_(rest, rest)] + np.diag(ridge / weights[rest])
        solved[fold, rest] = solve(system, t[rest], assume_a="pos", overwrite_a=True, check_finite=False)
        g[own] = kernel[np.ix_(own, rest)] @ solved[fold, rest]
    return g, solved
