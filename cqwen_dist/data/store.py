"""Tokenised texts as Arrow record batches, in memory or mapped from a file: one row a text.

A row has one number for each <NUM>, not for each token: about 5 bytes a token in all. The file is in Arrow's stream
format, so `datasets.Dataset.from_file` opens it too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("ids", pa.list_(pa.int32())),  # the end token included
        ("numbers", pa.list_(pa.float64())),  # one for each <NUM> among the ids
        ("targets", pa.list_(pa.int8())),  # as many: 1 + its type where the regression learns it
        ("unlearnt", pa.list_(pa.int32())),  # start, end, start, end, ...: tokens that are read only
        ("labels", pa.list_(pa.int32())),  # partial labels after the text: w if word w can come next, ~w if not
        ("more", pa.list_(pa.float64())),  # further values of the text's one target
        ("overflows", pa.int32()),
        ("left", pa.int32()),  # numerals that stayed text
        ("digest", pa.binary(32)),  # of the text
    ]
)


def offsets_of(counts: np.ndarray | Sequence[int]) -> np.ndarray:
    """Offsets [n+1] of lists with these counts of members [n]."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


class Document(NamedTuple):
    """A text's tokens, or a piece of them; all arrays have one length t >= 1."""

    ids: np.ndarray  # [t] integers
    values: np.ndarray  # [t] float64; the value at <NUM>, 0 at words
    targets: np.ndarray  # [t] bool; True at a <NUM> whose value the regression learns
    learnt: np.ndarray | None = None  # [t] bool; False at tokens that are read only (a prompt's); None: all are learnt
    types: np.ndarray | None = None  # [t] int8: the type of a target, 0 for other; None: all are 0
    more: np.ndarray | None = None  # [k] float64: further values of the only target; None: without
    labels: np.ndarray | None = None  # [k] int32: partial labels after the text (`SCHEMA`); None: without


# One row of a batch: a single document, or several that were packed.
Sample = tuple[Document, ...]


class _Lists(NamedTuple):
    """A column of lists, not copied."""

    values: np.ndarray
    at: np.ndarray  # offsets

    def of(self, row: int) -> np.ndarray:
        """A row's list."""
        return self.values[self.at[row] : self.at[row + 1]]


class _View(NamedTuple):
    """The first columns of `SCHEMA`."""

    ids: _Lists
    numbers: _Lists
    targets: _Lists
    unlearnt: _Lists
    labels: _Lists
    more: _Lists


class TokenStore:
    """Texts 0 to n - 1. Args: batches, of `SCHEMA`; num_token_id."""

    def __init__(self, batches: Sequence[pa.RecordBatch], num_token_id: int) -> None:
        self._batches = [batch for batch in batches if batch.num_rows]
        self.num_token_id = num_token_id
        self._views = [_view_of(batch) for batch in self._batches]
        self._first = offsets_of([batch.num_rows for batch in self._batches])
        sizes = [np.diff(view.ids.at) for view in self._views]
        self.lengths = np.concatenate([np.zeros(0, np.int32), *sizes])  # [n] int32, tokens of each text

    @classmethod
    def open(cls, path: Path, num_token_id: int) -> TokenStore:
        """A file, mapped: its pages belong to the file, not to the process. Raises: OSError, pa.ArrowException."""
        with pa.memory_map(str(path)) as file:
            return cls(pa.ipc.open_stream(file).read_all().to_batches(), num_token_id)

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, text: int, start: int, end: int) -> Document:
        """Tokens start to end of a text."""
        b = int(np.searchsorted(self._first, text, "right")) - 1
        view, row = self._views[b], text - int(self._first[b])
        whole = view.ids.of(row)
        ids = whole[start:end]
        is_number = ids == self.num_token_id
        before = np.count_nonzero(whole[:start] == self.num_token_id)
        mine = slice(before, before + np.count_nonzero(is_number))
        values = np.zeros(len(ids))
        targets = np.zeros(len(ids), np.int8)
        values[is_number] = view.numbers.of(row)[mine]
        targets[is_number] = view.targets.of(row)[mine]
        types = np.maximum(targets - 1, 0) if (targets > 1).any() else None
        labels, more, marks = view.labels.of(row), view.more.of(row), view.unlearnt.of(row)
        learnt = np.ones(len(ids), bool) if len(marks) else None
        for low, high in zip(marks[::2], marks[1::2], strict=True):
            learnt[max(low - start, 0) : max(high - start, 0)] = False  # type: ignore[index]
        return Document(
            ids,
            values,
            targets != 0,
            learnt,
            types,
            more if len(more) and targets.any() else None,
            labels if len(labels) and end == len(whole) else None,  # after the text's last piece
        )

    def column(self, name: str) -> np.ndarray:
        """A column of whole numbers for all texts [n]."""
        return np.concatenate([np.zeros(0, np.int32), *(b.column(name).to_numpy() for b in self._batches)])

    def parts(self, kind: str, texts: np.ndarray | None = None, which: slice = slice(None)) -> Iterator[np.ndarray]:
        """The ids, the numbers or the targets' values of some texts, batch by batch.

        texts: [m] rising; None: all. which: of the batches.
        """
        for b, view in list(enumerate(self._views))[which]:
            values, at = view.ids if kind == "ids" else view.numbers
            keep = np.ones(len(values), bool) if kind != "targets" else view.targets.values != 0
            if texts is not None:
                low, high = np.searchsorted(texts, self._first[b : b + 2])
                mine = np.zeros(len(at) - 1, bool)
                mine[texts[low:high] - self._first[b]] = True
                keep &= np.repeat(mine, np.diff(at))
            yield values if keep.all() else values[keep]

    def digest(self, texts: np.ndarray | None = None) -> str:
        """SHA-256 of ids, numbers, targets and what is not learnt, however they are cut into batches.

        texts: [m] rising; None: all.
        """
        parts = [hashlib.sha256() for _ in range(7)]
        for b, batch in enumerate(self._batches):
            if texts is not None:
                low, high = np.searchsorted(texts, self._first[b : b + 2])
                batch = batch.take(pa.array(texts[low:high] - self._first[b]))
            view = _view_of(batch)
            counts = [np.diff(lists.at).astype(np.int64) for lists in (view.ids, view.numbers, view.unlearnt)]
            for part, array in zip(parts, [*(lists.values for lists in view[:4]), *counts], strict=True):
                part.update(np.ascontiguousarray(array).data)
            for lists in (view.labels, view.more):
                if len(lists.values):  # without any the digest is as it always was
                    parts[-1].update(np.ascontiguousarray(lists.values).data)
                    parts[-1].update(np.diff(lists.at).data)
        return hashlib.sha256(b"".join(part.digest() for part in parts)).hexdigest()


def _view_of(batch: pa.RecordBatch) -> _View:
    return _View(*(_Lists(c.values.to_numpy(), c.offsets.to_numpy()) for c in batch.columns[: len(_View._fields)]))
