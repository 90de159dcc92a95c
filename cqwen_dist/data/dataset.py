"""Tokenised texts, cut to length and optionally packed: the loaders draw samples from them."""

import hashlib
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cqwen_dist.config.data import DataConfig
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.data.store import Sample, TokenStore
from cqwen_dist.heads.targets import NumericStatistics, numeric_statistics

# Pieces per packing window: enough to fill rows to 99 % or more, few enough for memory.
_WINDOW = 1 << 16


class Pieces(NamedTuple):
    """Text pieces [P]: tokens [start, end) from text `text`."""

    text: np.ndarray  # all int32: 12 bytes per piece
    start: np.ndarray
    end: np.ndarray


class Rows(NamedTuple):
    """Packed rows: row r has pieces[begin[r]:begin[r + 1]]."""

    pieces: np.ndarray  # [P] int64
    begin: np.ndarray  # [R+1] int64


def cut(lengths: np.ndarray, texts: np.ndarray | None, length: int, most: int | None = None) -> Pieces:
    """Cut texts with `lengths` tokens [n] into pieces of at most `length` tokens that overlap by one.

    Each token except a text's first is predicted exactly once; a one-token text has no piece. lengths: [n] int32;
    texts: [n] text indices, None: 0 to n - 1; most: maximum pieces per text, later ones are dropped.
    """
    # Pieces advance by length - 1: a piece's last label is the first input of the next piece.
    counts = np.maximum(-(-(lengths - 1) // (length - 1)), 0)
    if most is not None:
        counts = np.minimum(counts, most)
    which = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    first = np.repeat((counts.cumsum(dtype=np.int64) - counts).astype(np.int32), counts)
    start = (np.arange(len(which), dtype=np.int32) - first) * np.int32(length - 1)
    end = np.minimum(start.astype(np.int64) + length, lengths[which]).astype(np.int32)
    return Pieces(which if texts is None else texts[which].astype(np.int32), start, end)


def pack(lengths: np.ndarray, capacity: int) -> Rows:
    """Pack pieces into rows of at most `capacity` tokens: longest first, into the fullest row that fits."""
    pieces, sizes = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
    for begin in range(0, len(lengths), _WINDOW):
        rows = _pack(lengths[begin : begin + _WINDOW].tolist(), capacity)
        pieces.append(np.array([i for row in rows for i in row], np.int64) + begin)
        sizes.append(np.array([len(row) for row in rows], np.int64))
    return Rows(np.concatenate(pieces), np.concatenate(sizes).cumsum())


def _pack(lengths: list[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    rows_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces = 0  # bit s: a row has s tokens of space
    for piece in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[piece]
        # Best fit in constant time: the lowest set bit at or above `length` is the smallest space that fits.
        wide = spaces >> length
        if wide:
            space = length + (wide & -wide).bit_length() - 1
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                spaces ^= 1 << space
        else:
            row, space = len(rows), capacity
            rows.append([])
        rows[row].append(piece)
        rows_by_space[space - length].append(row)
        spaces |= 1 << (space - length)
    return rows


@dataclass
class DataReport:
    """Counts for a dataset."""

    texts: int = 0
    documents: int = 0  # text pieces, each at most sequence_length long
    sequences: int = 0  # samples: documents, or packed rows
    tokens: int = 0  # tokens around a text included
    numbers: int = 0
    targets: int = 0  # numbers whose value the regression learns
    overflows: int = 0  # numerals that float64 does not hold; they stay text
    first_overflow: str = ""
    left: int = 0  # numerals that stay text by policy
    truncated: int = 0  # texts longer than sequence_length; the first sequence_length tokens are used
    dropped: int = 0  # skipped texts longer than sequence_length
    lost: int = 0  # unused tokens of truncated and dropped texts
    lost_learnt: int = 0  # those of them that would have been learnt
    unlearnt: int = 0  # pieces left out, since no token in them is learnt
    apart: int = 0  # rows of a table whose target is in another piece than their first columns
    learnt_too: int = 0  # held-out texts that are training texts too

    def lines(self, name: str) -> list[str]:
        """Format the counts for people."""
        share = self.numbers / self.tokens if self.tokens else 0.0
        of, long = f"of {self.texts:,} texts", "longer than data.sequence_length"
        lost = f"{self.lost:,} tokens fewer"
        lost += "" if self.lost_learnt == self.lost else f", {self.lost_learnt:,} of them to learn"
        pieces = f"{self.unlearnt:,} of {self.unlearnt + self.documents:,} pieces left out"
        notes = [
            (self.documents > self.texts, f"long texts cut: {self.documents:,} pieces {of}"),
            (self.truncated, f"{self.truncated:,} {of}, {long}, truncated: {lost} (data.long_texts)"),
            (self.dropped, f"{self.dropped:,} {of}, {long}, left out: {lost} (data.long_texts)"),
            (self.unlearnt, f"{pieces}, as no token in them is learnt (data.sequence_length)"),
            (self.apart, f"{self.apart:,} {of} are {long}, so their target is cut away from their columns"),
            (self.learnt_too, f"{self.learnt_too:,} {of} are in data.train too, so the evaluation flatters the model"),
            (self.overflows, f"{self.overflows:,} numerals beyond float64 stay text, first {self.first_overflow}"),
        ]
        counts = f"{self.texts:,} texts, {self.tokens:,} tokens, {self.numbers:,} numbers ({share:.1%}), "
        counts += f"{self.targets:,} of them targets, in {self.sequences:,} sequences"
        return [f"{name}: {line}" for line in (counts, *(note for told, note in notes if told))]


class TextDataset:
    """Samples from stored texts. `dataset[i]` is a `Sample`: a tuple of documents (one unless packed).

    A text with more than T = sequence_length tokens (end token included) is split into pieces of T tokens that overlap
    by one, so each token except the first is predicted exactly once. `data.long_texts` can keep only the first piece,
    or none. `pack` puts complete pieces together into rows of at most T tokens (`pack`).

    Args: store: tokenised texts; texts: [m] int64, ascending: this dataset's texts, None for all; config:
    sequence_length, long_texts, pack; content: digest of the texts, or "" to compute it. Raises: UserError
    if sequence_length is below 2, or excludes every text.
    """

    def __init__(
        self,
        store: TokenStore,
        texts: np.ndarray | None,
        config: DataConfig,
        pad_token_id: int,
        report: DataReport,
        content: str = "",
    ) -> None:
        self.pad_token_id, self.num_token_id, self.report = pad_token_id, store.num_token_id, report
        self.store, self._given, self._content = store, texts, content
        self._pack, self._long, self._target = config.pack, config.long_texts, config.target_field
        self._cut(config.sequence_length)

    def _cut(self, length: int) -> None:
        if length < 2:
            raise UserError("data.sequence_length", length, "2 or more")
        self._length, self._texts = length, self._given
        self._kept: np.ndarray | None = None  # indices into this dataset's texts; None: all
        lengths = self.text_lengths()
        long = lengths > length
        count, tokens = int(long.sum()), int(lengths[long].sum(dtype=np.int64))
        if self._long == "drop" and count:
            if count == len(lengths):
                allowed = f"truncate or cut: every text has more than {length} tokens (data.sequence_length)"
                raise UserError("data.long_texts", "drop", allowed)
            self._kept = np.flatnonzero(~long)
            self._texts = self._kept if self._given is None else self._given[self._kept]
        self.report.dropped = count if self._long == "drop" else 0
        self.report.apart = self._count_apart(lengths, length) if self._long == "cut" and count else 0
        self.report.truncated = count if self._long == "truncate" else 0
        self.report.lost = 0 if self._long == "cut" else tokens - self.report.truncated * length
        most = 1 if self._long == "truncate" else None
        self._pieces = self._that_teach(cut(self.text_lengths(), self._texts, length, most))
        self._rows: Rows | None = pack(self._pieces.end - self._pieces.start, length) if self._pack else None
        self.report.documents, self.report.sequences = len(self._pieces.text), len(self)

    def _count_apart(self, lengths: np.ndarray, length: int) -> int:
        """Rows of a table whose target stands in a later piece. Raises: UserError if all do: that teaches nothing."""
        if self._target is None:
            return 0
        apart = int(self.store.targets_behind(length)[slice(None) if self._given is None else self._given].sum())
        if apart == len(lengths):
            found = Said(f"{length}, of which every row has more ({lengths.max():,} tokens at most)")
            allowed = (
                "so many that a row's columns stay with its target; or fewer columns, or a base with a longer context"
            )
            raise UserError("data.sequence_length", found, allowed)
        return apart

    def _that_teach(self, pieces: Pieces) -> Pieces:
        """The pieces with a learnt token: no step may be without a label. Raises: UserError if none has."""
        learnt = self.store.learnt_tokens(*pieces)
        stays = learnt > 0
        self.report.unlearnt = int((~stays).sum())
        self.report.lost_learnt = 0
        if self._long != "cut":
            every = np.arange(len(self.store)) if self._given is None else self._given
            sizes = self.store.lengths[every]
            whole = self.store.learnt_tokens(every, np.zeros_like(sizes), sizes)
            self.report.lost_learnt = int(whole.sum() - learnt.sum())
        if self.report.unlearnt and not stays.any():
            allowed = "more: prompts fill every piece of that length, so no token is learnt"
            raise UserError("data.sequence_length", self._length, allowed)
        return Pieces(*(part[stays] for part in pieces)) if self.report.unlearnt else pieces

    def with_length(self, length: int) -> "TextDataset":
        """The same texts (shared memory), cut and packed at this sequence length; self if it is the same."""
        if length == self._length:
            return self
        other = copy(self)
        other.report = replace(self.report)
        other._cut(length)
        return other

    def digest(self) -> str:
        """SHA-256 over the samples' content, and over how they are cut and packed."""
        found = hashlib.sha256((self._content or self.store.digest(self._given)).encode())
        found.update(b"all" if self._kept is None else self._kept.data)
        found.update(f"{self._length} {self._rows is not None}".encode())
        found.update(b"truncate" if self._long == "truncate" else b"")
        found.update(b"pieces that teach" if self.report.unlearnt else b"")
        if self._rows is not None:
            found.update(np.ascontiguousarray(self._rows.pieces).data)
        return found.hexdigest()

    def __len__(self) -> int:
        return len(self._pieces.text) if self._rows is None else len(self._rows.begin) - 1

    def __getitem__(self, index: int) -> Sample:
        pieces = [index]
        if self._rows is not None:
            pieces = self._rows.pieces[self._rows.begin[index] : self._rows.begin[index + 1]].tolist()
        text, start, end = self._pieces
        return tuple(self.store.document(int(text[i]), int(start[i]), int(end[i])) for i in pieces)

    def lengths(self) -> np.ndarray:
        """[len(self)] int32: tokens in each sample."""
        sizes = self._pieces.end - self._pieces.start
        if self._rows is None:
            return sizes
        return np.add.reduceat(sizes[self._rows.pieces], self._rows.begin[:-1]) if len(self) else sizes

    def text_lengths(self) -> np.ndarray:
        """[texts] int32: tokens in each text."""
        return self.store.lengths if self._texts is None else self.store.lengths[self._texts]

    def number_parts(self) -> Iterator[np.ndarray]:
        """Yield the targets' values in parts, float64."""
        return self.store.parts("targets", self._texts)

    def statistics(self) -> NumericStatistics:
        """Median and IQR/2 of the targets (seed S1 2)."""
        return numeric_statistics(self.number_parts())

    def word_counts(self, vocab_size: int) -> np.ndarray:
        """[V] int64: occurrences of each word."""
        counts = np.zeros(vocab_size, np.int64)
        for ids in self.store.parts("ids", self._texts):
            counts += np.bincount(ids, minlength=vocab_size)
        return counts
