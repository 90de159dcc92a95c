"""Tokenised texts as Arrow record batches, in memory or mapped from a file: one row a text.

Numbers are kept once a <NUM>, not once a token: about 5 bytes a token in all. The file is Arrow's stream format, so
`datasets.Dataset.from_file` opens it too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from cqwen_dist.data.document import Document

SCHEMA = pa.schema(
    [
        ("ids", pa.list_(pa.int32())),  # the end token included
        ("numbers", pa.list_(pa.float64())),  # one for each <NUM> among the ids
        ("targets", pa.list_(pa.int8())),  # as many: 1 + its type where the regression learns it
        ("unlearnt", pa.list_(pa.int32())),  # start, end, start, end, ...: tokens that are read only
        ("labels", pa.list_(pa.int32())),  # partial labels behind the text: w where word w holds, ~w where not
        ("more", pa.list_(pa.float64())),  # further values of the text's one target
        ("overflows", pa.int32()),
        ("left", pa.int32()),  # numerals that stayed text
        ("digest", pa.binary(32)),  # of the text
    ]
)


def offsets_of(counts: np.ndarray | Sequence[int]) -> np.ndarray:
    """Offsets of lists with so many members [n+1]."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


class _View(NamedTuple):
    """A record batch's buffers as arrays, none of them copied."""

    ids: np.ndarray
    ids_at: np.ndarray
    numbers: np.ndarray
    targets: np.ndarray
    numbers_at: np.ndarray
    unlearnt: np.ndarray
    unlearnt_at: np.ndarray
    labels: np.ndarray
    labels_at: np.ndarray
    more: np.ndarray
    more_at: np.ndarray


class TokenStore:
    """Texts 0 to n - 1. Args: batches, of `SCHEMA`; num_token_id."""

    def __init__(self, batches: Sequence[pa.RecordBatch], num_token_id: int) -> None:
        self._batches = [batch for batch in batches if batch.num_rows]
        self.num_token_id = num_token_id
        self._views: list[_View | None] = [None] * len(self._batches)
        self._first = offsets_of([batch.num_rows for batch in self._batches])
        sizes = [np.diff(self._view(b).ids_at) for b in range(len(self._batches))]
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
        view, row = self._view(b), text - int(self._first[b])
        at = view.ids_at[row]
        ids = view.ids[at + start : at + end]
        is_number = ids == self.num_token_id
        before = int((view.ids[at : at + start] == self.num_token_id).sum()) if start else 0
        first = view.numbers_at[row] + before
        values = np.zeros(len(ids))
        targets = np.zeros(len(ids), np.int8)
        count = int(is_number.sum())
        values[is_number] = view.numbers[first : first + count]
        targets[is_number] = view.targets[first : first + count]
        found = view.labels[view.labels_at[row] : view.labels_at[row + 1]]
        labels = found if len(found) and at + end == view.ids_at[row + 1] else None  # behind the text's last piece
        more = view.more[view.more_at[row] : view.more_at[row + 1]]
        types = np.maximum(targets - 1, 0) if (targets > 1).any() else None
        extra = types, more if len(more) and targets.any() else None, labels
        marks = view.unlearnt[view.unlearnt_at[row] : view.unlearnt_at[row + 1]]
        if not len(marks):
            return Document(ids, values, targets != 0, None, *extra)
        learnt = np.ones(len(ids), bool)
        for low, high in zip(marks[::2], marks[1::2], strict=True):
            learnt[max(low - start, 0) : max(high - start, 0)] = False
        return Document(ids, values, targets != 0, learnt, *extra)

    def column(self, name: str) -> np.ndarray:
        """A column of whole numbers for all texts [n]."""
        return np.concatenate([np.zeros(0, np.int32), *(b.column(name).to_numpy() for b in self._batches)])

    def first_of_digests(self) -> np.ndarray:
        """[n] uint64: the first 8 bytes of each text's digest."""
        parts = [np.frombuffer(b.column("digest").buffers()[1], ">u8", 4 * b.num_rows)[::4] for b in self._batches]
        return np.concatenate([np.zeros(0, np.uint64), *(part.astype(np.uint64) for part in parts)])

    def text_digest(self, text: int) -> bytes:
        """The digest of a text, whole."""
        b = int(np.searchsorted(self._first, text, "right")) - 1
        return bytes(self._batches[b].column("digest")[text - int(self._first[b])].as_py())

    def number_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers and targets of each text, both [n] int64."""
        numbers, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for b in range(len(self._batches)):
            view = self._view(b)
            ends = offsets_of((view.targets != 0).astype(np.int64))
            numbers.append(np.diff(view.numbers_at).astype(np.int64))
            targets.append(np.diff(ends[view.numbers_at]))
        return np.concatenate(numbers), np.concatenate(targets)

    def parts(self, kind: str, texts: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """The ids, the numbers or the targets' values of some texts, batch by batch. texts: [m] rising; None: all."""
        for b in range(len(self._batches)):
            view = self._view(b)
            at = view.ids_at if kind == "ids" else view.numbers_at
            values = view.ids if kind == "ids" else view.numbers
            keep = np.ones(len(values), bool) if kind != "targets" else view.targets != 0
            if texts is not None:
                low, high = np.searchsorted(texts, self._first[b : b + 2])
                mine = np.zeros(len(at) - 1, bool)
                mine[texts[low:high] - self._first[b]] = True
                keep &= np.repeat(mine, np.diff(at))
            yield values if keep.all() else values[keep]

    def digest(self) -> str:
        """SHA-256 of ids, numbers, targets and what is not learnt, however they are cut into batches."""
        content = ContentDigest()
        for batch in self._batches:
            content.update(batch)
        return content.hexdigest()

    def _view(self, b: int) -> _View:
        view = self._views[b]
        if view is None:
            view = self._views[b] = _view_of(self._batches[b])
        return view


class ContentDigest:
    """The digest of a store, batch by batch."""

    def __init__(self) -> None:
        self._parts = [hashlib.sha256() for _ in range(7)]

    def update(self, batch: pa.RecordBatch) -> None:
        """The next batch."""
        view = _view_of(batch)
        counts = [np.diff(at).astype(np.int64) for at in (view.ids_at, view.numbers_at, view.unlearnt_at)]
        arrays = [view.ids, view.numbers, view.targets, view.unlearnt, *counts]
        for part, array in zip(self._parts, arrays, strict=True):
            part.update(np.ascontiguousarray(array).data)
        extra = [view.labels, np.diff(view.labels_at)] if len(view.labels) else []
        extra += [view.more, np.diff(view.more_at)] if len(view.more) else []
        for array in extra:
            self._parts[-1].update(np.ascontiguousarray(array).data)  # without any the digest is as it always was

    def hexdigest(self) -> str:
        """Of all so far."""
        return hashlib.sha256(b"".join(part.digest() for part in self._parts)).hexdigest()


def _view_of(batch: pa.RecordBatch) -> _View:
    ids, numbers, targets, unlearnt, labels, more = (batch.column(i) for i in range(6))
    return _View(
        ids.values.to_numpy(),
        ids.offsets.to_numpy(),
        numbers.values.to_numpy(),
        targets.values.to_numpy(),
        numbers.offsets.to_numpy(),
        unlearnt.values.to_numpy(),
        unlearnt.offsets.to_numpy(),
        labels.values.to_numpy(),
        labels.offsets.to_numpy(),
        more.values.to_numpy(),
        more.offsets.to_numpy(),
    )
