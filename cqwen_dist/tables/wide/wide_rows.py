"""Feature rows F for the wide part's ridge regression (`wide_start`). Each block has mean square 1 per row:

- words: an n-gram found in m of n texts is weighted by its idf, ln((1+n)/(1+m)) + 1
- lines, weighted the same
- named numbers: phi(value) and the value, centred, scaled to variance 1 and clipped
- random features of all named numbers (`NamedNumbers`)
- states of the base's layers, here and in the mean, each centred and scaled to variance 1
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_matrix, diags
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.tables.wide.wide_part import FAR, WidePart, bytes_of, fold_of, lines_begin
from cqwen_dist.tables.wide.wide_size import FOLDS, NAMES

COMMON = 0.05  # a name counts only if this share of the texts contains it
MOST = 1e30  # of a value, so that its square is finite
LEAST_SPREAD = 1e-4  # of phi: below it a value is a constant
WIDTHS = (0.25, 0.5, 0.7, 1.0, 2.0)  # of the random features' kernel, in units of `NamedRows.unit`


class TextBefore(NamedTuple):
    """The text before a number: columns of n-grams and lines [m]; the fold; keys, phi and values of the numbers [k];
    states of the base's layers [k]."""

    columns: np.ndarray
    fold: int
    names: np.ndarray
    phi: np.ndarray
    values: np.ndarray
    layers: np.ndarray


def texts_before(wide: WidePart, batch: Batch, at: Tensor, states: Tensor | None = None) -> list[TextBefore]:
    """The texts before numbers. at [N]: the positions that the numbers follow, indices into the flattened [B,T]. states
    [N,...]: as `WidePart.forward` takes them."""
    read = np.zeros((len(at), 0), np.float32) if states is None else states.float().cpu().numpy()
    found = wide.entries(batch.input_ids, batch.numeric_values, batch.position_ids)
    folds, begins = fold_of(found.text).flatten()[at].tolist(), found.begin.clamp(min=0).flatten()[at].tolist()
    columns, counts = found.columns.cpu().numpy(), found.counts.cpu().numpy()
    names, phi, value, number = (part.cpu().numpy() for part in (found.name, found.phi, found.value, found.number))
    texts = []
    for place, first, fold, own_states in zip(at.tolist(), begins, folds, read, strict=True):
        row, last = divmod(place, batch.input_ids.shape[1])
        text = row, slice(first, last + 1)
        is_number = number[text] != 0
        own = (names[text][is_number], phi[text][is_number], value[text][is_number])
        texts.append(TextBefore(columns[text][counts[text] != 0], fold, *own, own_states))
    return texts


def hashed_rows(texts: Sequence[TextBefore], columns: int) -> tuple[csr_matrix, csr_matrix, np.ndarray]:
    """Rows for words and for lines [n,columns], and the weight per count [columns]."""
    counts = counts_of(texts, columns)
    n, held = len(texts), np.bincount(counts.indices, minlength=columns)
    scaling = np.log((1 + n) / (1 + held)) + 1
    squares = np.asarray((counts @ diags(scaling)).power(2).sum(0))[0]
    is_line = np.arange(columns) >= lines_begin(columns)
    for part in (is_line, ~is_line):
        scaling[part] /= np.sqrt(max(squares[part].sum() / n, 1e-12))
    words, lines = (csr_matrix(counts @ diags(scaling * part)) for part in (~is_line, is_line))
    return words, lines, scaling


def counts_of(texts: Sequence[TextBefore], columns: int) -> csr_matrix:
    """Counts per text and column, [n,columns]."""
    places = np.concatenate([text.columns for text in texts])
    ends = np.cumsum([0, *(len(text.columns) for text in texts)])
    found = csr_matrix((np.ones(len(places)), places, ends), (len(texts), columns))
    found.sum_duplicates()
    return found


def kernel_of(rows: csr_matrix) -> np.ndarray:
    """F F^T [n,n]. Columns shared by many texts are multiplied as dense ones."""
    held = np.bincount(rows.indices, minlength=rows.shape[1])
    common = held > rows.shape[0] // 8
    dense = rows[:, common].toarray()
    rare = rows[:, ~common]
    return dense @ dense.T + (rare @ rare.T).toarray()


@dataclass(frozen=True)
class NamedRows:
    """The numbers of n texts under k names: x [n,k] of phi, raw [n,k] of their values; keys [k] of the names; centres
    and slopes [2,k] of both."""

    x: np.ndarray
    raw: np.ndarray
    keys: np.ndarray
    centre: np.ndarray
    slope: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[TextBefore]) -> "NamedRows":
        """The most frequent names, if enough texts contain them and they are not constant."""
        text = np.repeat(np.arange(len(texts)), [len(one.names) for one in texts])
        keys, at = np.unique(np.concatenate([one.names for one in texts]), return_inverse=True)
        number = csr_matrix((np.ones(len(at)), (text, at)), (len(texts), len(keys)))
        phi, raw = (
            csr_matrix((np.concatenate(parts).astype(np.float64), (text, at)), number.shape)
            for parts in ([one.phi for one in texts], [one.values.clip(-MOST, MOST) for one in texts])
        )
        of_phi, of_raw = _moments(phi, number), _moments(raw, number)
        held = number.getnnz(0)
        known = np.flatnonzero((held >= max(FOLDS, COMMON * len(texts))) & (of_phi[1] > LEAST_SPREAD))
        known = known[np.argsort(-held[known], kind="stable")][:NAMES]
        count = number[:, known].toarray()
        centre, spread = (np.stack(pair)[:, known] for pair in zip(of_phi, of_raw, strict=True))
        slope = 1 / np.maximum(spread, 1e-30)
        x, of_values = (
            ((of[:, known].toarray() - count * c) * m).clip(-FAR, FAR)
            for of, c, m in zip((phi, raw), centre, slope, strict=True)
        )
        return cls(x, of_values, keys[known], centre, slope)

    @property
    def unit(self) -> float:
        """Root mean square distance from the mean, over the rows of x."""
        return float(np.sqrt(max(np.square(self.x).sum(1).mean(), 1e-12)))

    @property
    def linear(self) -> np.ndarray:
        return self.x / self.unit

    @property
    def values(self) -> np.ndarray:
        """As `linear`, for the raw values."""
        return self.raw / self.unit

    def tables(self, weight: np.ndarray, of_values: np.ndarray) -> dict[str, np.ndarray]:
        """Weights [tables,k] of `linear` and of `values` -> the parameters of `NamedNumbers`, as the wide part names
        them."""
        spare = [0, NAMES - len(self.keys)]
        found = {
            "names": np.pad(bytes_of(torch.from_numpy(self.keys)), [spare, [0, 0]]),
            "centre": np.pad(self.centre, [[0, 0], spare]),
            "slope": np.pad(self.slope, [[0, 0], spare]),
            "linear": np.concatenate([np.pad(w / self.unit, [[0, 0], spare]) for w in (weight, of_values)], 1),
        }
        return {f"numbers.{name}": table for name, table in found.items()}

    def random(self, count: int) -> Iterator["RandomRows"]:
        """Candidates: normal frequencies have the kernel exp(-d^2 / 2), Laplace's the product of 1 / (1 + d_k^2)."""
        names = len(self.keys)
        if not count or not names:
            return
        draw = np.random.default_rng(0)
        offsets = draw.uniform(0, 2 * np.pi, count)
        for drawn in (draw.standard_normal((names, count)), draw.laplace(size=(names, count))):
            for width in WIDTHS:
                frequencies = drawn / (width * self.unit)
                features = np.cos(self.x @ frequencies + offsets) * np.sqrt(2 / count)
                yield RandomRows(features, frequencies, offsets)


def _moments(value: csr_matrix, number: csr_matrix) -> tuple[np.ndarray, np.ndarray]:
    """(Mean, standard deviation) of the numbers under each name, [k] each; sums of a text's value, counts in number."""
    times = np.asarray(number.sum(0))[0]
    mean = np.asarray(value.sum(0))[0] / times
    return mean, np.sqrt((np.asarray(value.power(2).sum(0))[0] / times - mean**2).clip(min=0))


@dataclass(frozen=True)
class RandomRows:
    """Random features x [n,D] of n texts, of mean square 1 a row; frequencies [k,D] and offsets [D] that give them."""

    x: np.ndarray
    frequencies: np.ndarray
    offsets: np.ndarray

    def tables(self, weight: np.ndarray) -> dict[str, np.ndarray]:
        """weight [tables,D] of x -> the parameters of `NamedNumbers`, as the wide part names them."""
        return {
            "numbers.frequencies": np.pad(self.frequencies, [[0, NAMES - len(self.frequencies)], [0, 0]]),
            "numbers.offsets": self.offsets,
            "numbers.weight": weight * np.sqrt(2 / len(self.offsets)),
        }


@dataclass(frozen=True)
class LayerRows:
    """The states of the base's layers x [n,k] of n texts, of mean square 1 a row; centres and slopes [k]."""

    x: np.ndarray
    centre: np.ndarray
    slope: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[TextBefore]) -> "LayerRows":
        states = np.stack([text.layers for text in texts]).astype(np.float64)
        centre, spread = states.mean(0), states.std(0)
        least = LEAST_SPREAD * max(spread.max(initial=0.0), 1e-30)
        slope = 1 / np.maximum(spread, least) / np.sqrt(max(len(spread), 1))
        return cls((states - centre) * slope, centre, slope)

    def tables(self, weight: np.ndarray) -> dict[str, np.ndarray]:
        """The parameter of `WidePart` that has these weights [tables,k] of x."""
        weight = weight * self.slope
        return {"layers": np.column_stack([weight, -weight @ self.centre])}
