"""Tokenised texts as Arrow record batches, in memory or mapped from a file: one row a text.

Numbers are kept once a <NUM>, not once a token: about 5 bytes a token in all. The file is Arrow's stream format, so
`datasets.Dataset.from_file` opens it too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from cqwen_dist.config import UserError
from cqwen_dist.data.document import Document
from cqwen_dist.data.encoder import NumberEncoder, Reading
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.records import Text
from cqwen_dist.data.sources import text_digest

SCHEMA = pa.schema(
    [
        ("ids", pa.list_(pa.int32())),  # the end token included
        ("numbers", pa.list_(pa.float64())),  # one for each <NUM> among the ids
        ("targets", pa.list_(pa.int8())),  # as many: 1 where the regression learns it
        ("unlearnt", pa.list_(pa.int32())),  # start, end, start, end, ...: tokens that are read only
        ("labels", pa.list_(pa.int32())),  # partial labels behind the text: w where word w holds, ~w where not
        ("overflows", pa.int32()),
        ("left", pa.int32()),  # numerals that stayed text
        ("digest", pa.binary(32)),  # of the text
    ]
)


class Recipe(NamedTuple):
    """What becomes of a text behind the encoder."""

    end: int  # the id that ends every text
    numeric_targets: str
    min_tokens: int
    max_tokens: int


class Chunk(NamedTuple):
    """Some texts tokenised: a row each; overflows as (row, place, literal); which rows are not of a length to stay."""

    batch: pa.RecordBatch
    overflows: list[tuple[int, str, str]]
    too_short: np.ndarray  # [n] bool
    too_long: np.ndarray  # [n] bool


class _Row(NamedTuple):
    """A text that was read: its segments, whether each is learnt, what was read in each; tokens that are not learnt."""

    text: Text
    segments: list[tuple[str, bool]]
    readings: list[Reading]
    unlearnt: list[int]  # start, end, start, end, ...

    def ids(self) -> bytes:
        """As int32, without the end token."""
        return b"".join([reading.ids for reading in self.readings])

    def overflows(self) -> list[str]:
        """Literals too large for float64."""
        return [literal for reading in self.readings for literal in reading.overflows]


def encode_chunk(texts: Sequence[Text], encoder: NumberEncoder, recipe: Recipe) -> Chunk:
    """Tokenise some texts, an end token behind each; a number that opens a text is no target (nothing predicts it)."""
    rows = _read(texts, encoder)
    ids = [row.ids() for row in rows]
    sizes = np.array([len(own) // 4 + 1 for own in ids], np.int64)
    offsets = _offsets(sizes)
    flat = np.frombuffer(np.int32(recipe.end).tobytes().join([*ids, b""]), np.int32)
    numbers = np.fromiter(chain.from_iterable(r.numbers for row in rows for r in row.readings), np.float64)
    numbers_at, targets = _targets(rows, flat, offsets, encoder, recipe)
    overflows = [row.overflows() for row in rows]
    labels = [_labels(text, encoder) for text in texts]
    columns = [
        _lists(flat, offsets),
        _lists(numbers, numbers_at),
        _lists(targets, numbers_at),
        _lists(
            np.fromiter(chain.from_iterable(row.unlearnt for row in rows), np.int32),
            _offsets([len(row.unlearnt) for row in rows]),
        ),
        _lists(np.fromiter(chain.from_iterable(labels), np.int32), _offsets([len(own) for own in labels])),
        pa.array(map(len, overflows), pa.int32()),
        pa.array([sum(reading.left for reading in row.readings) for row in rows], pa.int32()),
        pa.array(map(text_digest, texts), pa.binary(32)),
    ]
    found = [(i, texts[i].where, literal) for i, own in enumerate(overflows) for literal in own]
    batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    return Chunk(batch, found, sizes < recipe.min_tokens, sizes > recipe.max_tokens)


def _labels(text: Text, encoder: NumberEncoder) -> list[int]:
    """The partial labels of a text, as the column has them. Raises `UserError` for a word that is not one token."""
    found = []
    for (word, holds), reading in zip(text.labels, encoder.read([word for word, _ in text.labels]), strict=True):
        if len(reading.ids) != 1:
            raise UserError("data.labels_field", word, "words of one token, mostly with the space before", text.where)
        found.append(reading.ids[0] if holds else ~reading.ids[0])
    return found


def _targets(
    rows: list[_Row], flat: np.ndarray, offsets: np.ndarray, encoder: NumberEncoder, recipe: Recipe
) -> tuple[np.ndarray, np.ndarray]:
    """Where each row's numbers begin among all [n+1], and which of them are targets [M] int8."""
    places = np.flatnonzero(flat == encoder.num_token_id)
    owner = np.searchsorted(offsets, places, "right") - 1
    numbers_at = _offsets(np.bincount(owner, minlength=len(rows)))
    targets = (places > offsets[owner]).astype(np.int8)
    if recipe.numeric_targets == "last":
        targets[:-1] *= owner[1:] != owner[:-1]
    for i, row in enumerate(rows):
        if row.text.target is not None or row.unlearnt:
            mine = slice(numbers_at[i], numbers_at[i + 1])
            targets[mine] *= _allowed(row, places[mine] - offsets[i], encoder)
    return numbers_at, targets


def _read(texts: Sequence[Text], encoder: NumberEncoder) -> list[_Row]:
    """Every segment of every text, read all at once."""
    segments = [_segments(text) for text in texts]
    readings = iter(encoder.read([segment for own in segments for segment, _ in own]))
    rows = []
    for text, own in zip(texts, segments, strict=True):
        found = list(islice(readings, len(own)))
        rows.append(_Row(text, own, found, _unlearnt(text, own, found)))
    return rows


def _segments(text: Text) -> list[tuple[str, bool]]:
    """The text cut where learning starts or stops: (piece, whether it is learnt)."""
    if text.learnt is None:
        return [(text.text, True)]
    pieces, position = [], 0
    for start, end in text.learnt:
        pieces += [(text.text[position:start], False), (text.text[start:end], True)]
        position = end
    pieces.append((text.text[position:], False))
    return [piece for piece in pieces if piece[0]]


def _unlearnt(text: Text, segments: list[tuple[str, bool]], readings: list[Reading]) -> list[int]:
    if text.learnt is None:
        return []
    found, position = [], 0
    for (_, learnt), reading in zip(segments, readings, strict=True):
        if not learnt:
            found += [position, position + len(reading.ids)]
        position += len(reading.ids)
    if not segments[-1][1]:  # a text whose end is not learnt has an end token that is not, either
        found[-1] += 1
    return found


def _inside(segments: list[tuple[str, bool]], target: tuple[int, int], encoder: NumberEncoder) -> np.ndarray:
    """Which numbers stand inside the characters of `target` [M] bool."""
    found, position = [], 0
    for segment, _ in segments:
        for start, end, value in find_numbers(segment, encoder.policy) if encoder.policy is not None else ():
            if np.isfinite(value):
                found.append(target[0] <= position + start and position + end <= target[1])
        position += len(segment)
    return np.array(found, bool)


def _allowed(row: _Row, places: np.ndarray, encoder: NumberEncoder) -> np.ndarray:
    """Which numbers of a text may be targets [M] bool: inside `text.target`, and learnt. places [M]: among its ids."""
    target = row.text.target
    found = np.ones(len(places), bool) if target is None else _inside(row.segments, target, encoder)
    for first, last in zip(row.unlearnt[::2], row.unlearnt[1::2], strict=True):
        found &= (places < first) | (places >= last)
    return found


def _offsets(counts: np.ndarray | Sequence[int]) -> np.ndarray:
    """Offsets of lists with so many members [n+1]."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _lists(values: np.ndarray, offsets: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))


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


class TokenStore:
    """Texts 0 to n - 1. Args: batches, of `SCHEMA`; num_token_id."""

    def __init__(self, batches: Sequence[pa.RecordBatch], num_token_id: int) -> None:
        self._batches = [batch for batch in batches if batch.num_rows]
        self.num_token_id = num_token_id
        self._views: list[_View | None] = [None] * len(self._batches)
        self._first = _offsets([batch.num_rows for batch in self._batches])
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
        targets = np.zeros(len(ids), bool)
        count = int(is_number.sum())
        values[is_number] = view.numbers[first : first + count]
        targets[is_number] = view.targets[first : first + count] != 0
        found = view.labels[view.labels_at[row] : view.labels_at[row + 1]]
        labels = found if len(found) and at + end == view.ids_at[row + 1] else None  # behind the text's last piece
        marks = view.unlearnt[view.unlearnt_at[row] : view.unlearnt_at[row + 1]]
        if not len(marks):
            return Document(ids, values, targets, None, labels)
        learnt = np.ones(len(ids), bool)
        for low, high in zip(marks[::2], marks[1::2], strict=True):
            learnt[max(low - start, 0) : max(high - start, 0)] = False
        return Document(ids, values, targets, learnt, labels)

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
            ends = _offsets(view.targets.astype(np.int64))
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
        for array in (view.labels, np.diff(view.labels_at)) if len(view.labels) else ():
            self._parts[-1].update(np.ascontiguousarray(array).data)  # without any the digest is as it always was

    def hexdigest(self) -> str:
        """Of all so far."""
        return hashlib.sha256(b"".join(part.digest() for part in self._parts)).hexdigest()


def _view_of(batch: pa.RecordBatch) -> _View:
    ids, numbers, targets, unlearnt, labels = (batch.column(i) for i in range(5))
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
    )
