"""Tokenised texts as Arrow record batches, in memory or mapped from a file. One row per text.

A row has a number per <NUM>, not per token: about 5 bytes per token in total. The file uses Arrow's stream format, so
`datasets.Dataset.from_file` can open it too.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("ids", pa.list_(pa.int32())),  # the end token included
        ("numbers", pa.list_(pa.float64())),  # one per <NUM> in ids
        ("targets", pa.list_(pa.int8())),  # one per number: 1 if the regression learns it, else 0
        ("unlearnt", pa.list_(pa.int32())),  # start, end, start, end, ...: tokens in the context that are not learnt
        ("overflows", pa.int32()),
        ("left", pa.int32()),  # numerals that stayed text
        ("digest", pa.binary(32)),  # SHA-256 of the text
    ]
)


def first_of_digests(column: pa.Array) -> np.ndarray:
    """[n] uint64: first 8 bytes of each digest, enough to distinguish texts. column: n values of 32 bytes."""
    rows = slice(4 * column.offset, 4 * (column.offset + len(column)), 4)
    return np.frombuffer(column.buffers()[1] or b"", ">u8")[rows].astype(np.uint64)


class Document(NamedTuple):
    """The tokens of one text or piece. All [t] arrays have the same length t >= 1."""

    ids: np.ndarray  # [t] integers
    values: np.ndarray  # [t] float64; value at <NUM>, 0 at words
    targets: np.ndarray  # [t] bool; True at a <NUM> whose value the regression learns
    learnt: np.ndarray | None = None  # [t] bool; False at context tokens, such as a prompt; None: all are learnt


# One batch row: a document, or multiple packed ones.
Sample = tuple[Document, ...]


class _Lists(NamedTuple):
    """A list column as NumPy views, without a copy."""

    values: np.ndarray
    at: np.ndarray  # offsets

    def of(self, row: int) -> np.ndarray:
        """The list in a row."""
        return self.values[self.at[row] : self.at[row + 1]]


class _View(NamedTuple):
    """The first columns in `SCHEMA`."""

    ids: _Lists
    numbers: _Lists
    targets: _Lists
    unlearnt: _Lists


class TokenStore:
    """Texts 0 to n - 1. Args: batches: with `SCHEMA`; num_token_id."""

    def __init__(self, batches: Sequence[pa.RecordBatch], num_token_id: int) -> None:
        self._batches = [batch for batch in batches if batch.num_rows]
        self.num_token_id = num_token_id
        self._views = [_view_of(batch) for batch in self._batches]
        self._first = np.cumsum([0, *(batch.num_rows for batch in self._batches)])  # text of each batch
        sizes = [np.diff(view.ids.at) for view in self._views]
        self.lengths = np.concatenate([np.zeros(0, np.int32), *sizes])  # [n] int32: tokens per text

    @classmethod
    def open(cls, path: Path, num_token_id: int) -> "TokenStore":
        """Map a file; its pages stay in the page cache, not in process memory. Raises: OSError, pa.ArrowException."""
        with pa.memory_map(str(path)) as file:
            return cls(pa.ipc.open_stream(file).read_all().to_batches(), num_token_id)

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, text: int, start: int, end: int) -> Document:
        """Tokens [start, end) of a text."""
        b = int(np.searchsorted(self._first, text, "right")) - 1
        view, row = self._views[b], text - int(self._first[b])
        whole = view.ids.of(row)
        ids = whole[start:end]
        is_number = ids == self.num_token_id
        # Numbers are stored per <NUM>, so count those before the piece to find its numbers.
        before = np.count_nonzero(whole[:start] == self.num_token_id)
        mine = slice(before, before + np.count_nonzero(is_number))
        values = np.zeros(len(ids))
        targets = np.zeros(len(ids), bool)
        values[is_number] = view.numbers.of(row)[mine]
        targets[is_number] = view.targets.of(row)[mine]
        marks = view.unlearnt.of(row)
        learnt = np.ones(len(ids), bool) if len(marks) else None
        for low, high in zip(marks[::2], marks[1::2], strict=True):
            learnt[max(low - start, 0) : max(high - start, 0)] = False  # type: ignore[index]
        return Document(ids, values, targets, learnt)

    def learnt_tokens(self, text: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """[P] tokens that pieces of texts teach: those that are learnt, without the first, which nothing predicts.

        text [P]: ascending indices; start, end [P]: the pieces' tokens.
        """
        found = np.maximum(end - start - 1, 0).astype(np.int64)
        for b, view in enumerate(self._views):
            low, high = np.searchsorted(text, self._first[b : b + 2])
            if low == high or not len(view.unlearnt.values):
                continue
            # Pair every piece with every unlearnt range of its text, and subtract the tokens that they share.
            rows = text[low:high] - self._first[b]
            at = view.unlearnt.at // 2
            counts = np.diff(at)[rows]
            piece = low + np.repeat(np.arange(high - low), counts)
            mark = np.arange(len(piece)) - np.repeat(counts.cumsum() - counts, counts) + np.repeat(at[rows], counts)
            begin, stop = view.unlearnt.values[2 * mark], view.unlearnt.values[2 * mark + 1]
            shared = np.minimum(stop, end[piece]) - np.maximum(begin, start[piece] + 1)
            found -= np.bincount(piece, np.maximum(shared, 0), len(found)).astype(np.int64)
        return found

    def targets_behind(self, length: int) -> np.ndarray:
        """[n] bool: texts with a target at token `length` or later, counted from 0."""
        found = [np.zeros(0, bool)]
        for view in self._views:
            place = np.flatnonzero(view.ids.values == self.num_token_id)[view.targets.values != 0]
            row = np.searchsorted(view.ids.at, place, "right") - 1
            found.append(np.bincount(row, place - view.ids.at[row] >= length, len(view.ids.at) - 1) > 0)
        return np.concatenate(found)

    def count_in(self, other: "TokenStore") -> int:
        """Number of these texts that are in the other store too."""
        none = np.zeros(0, np.uint64)
        columns = ([first_of_digests(batch.column("digest")) for batch in own._batches] for own in (self, other))
        mine, theirs = (np.concatenate([none, *parts]) for parts in columns)
        return int(np.isin(mine, theirs).sum())

    def column(self, name: str) -> np.ndarray:
        """An integer column over all texts [n]."""
        return np.concatenate([np.zeros(0, np.int32), *(b.column(name).to_numpy() for b in self._batches)])

    def parts(self, kind: str, texts: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Yield ids, numbers or target values (`kind`), batch by batch. texts: [m] ascending; None: all."""
        for view in self._views_of(texts):
            yield view.numbers.values[view.targets.values != 0] if kind == "targets" else getattr(view, kind).values

    def _views_of(self, texts: np.ndarray | None) -> Iterator[_View]:
        """The batches with the given texts only; None: all."""
        if texts is None:
            yield from self._views
            return
        for b, batch in enumerate(self._batches):
            low, high = np.searchsorted(texts, self._first[b : b + 2])
            yield _view_of(batch.take(pa.array(texts[low:high] - self._first[b])))

    def digest(self, texts: np.ndarray | None = None) -> str:
        """SHA-256 over ids, numbers, targets and learnt tokens; independent of the batch boundaries.

        texts: [m] ascending; None: all.
        """
        # One hash per column, so that the result does not depend on batch boundaries.
        parts = [hashlib.sha256() for _ in range(7)]
        for view in self._views_of(texts):
            counts = [np.diff(lists.at).astype(np.int64) for lists in (view.ids, view.numbers, view.unlearnt)]
            for part, array in zip(parts, [*(lists.values for lists in view), *counts], strict=True):
                part.update(np.ascontiguousarray(array).data)
        return hashlib.sha256(b"".join(part.digest() for part in parts)).hexdigest()


def _view_of(batch: pa.RecordBatch) -> _View:
    return _View(*(_Lists(c.values.to_numpy(), c.offsets.to_numpy()) for c in batch.columns[: len(_View._fields)]))
