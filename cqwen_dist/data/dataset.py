"""Tokenised texts in flat arrays, cut to length, packed if wished: what the loaders draw samples from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.collate import Document, Sample
from cqwen_dist.data.sources import ReadReport, Text, read_split
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer

# Texts that are tokenised in one call.
_CHUNK = 1000


@dataclass
class DataReport:
    """What became of the texts; `lines` says it to a person."""

    texts: int = 0
    documents: int = 0  # pieces of texts, each at most sequence_length long
    sequences: int = 0  # samples: documents, or rows of packed documents
    tokens: int = 0  # ends of text included
    numbers: int = 0
    targets: int = 0  # numbers whose value the regression learns
    overflows: int = 0  # numbers too large for float64, left as text
    first_overflow: str = ""

    def lines(self, name: str) -> list[str]:
        """The counts, one line each for what a person should know."""
        share = self.numbers / self.tokens if self.tokens else 0.0
        lines = [
            f"{name}: {self.texts:,} texts, {self.tokens:,} tokens, {self.numbers:,} numbers ({share:.1%}), "
            f"{self.targets:,} of them targets, in {self.sequences:,} sequences"
        ]
        if self.documents > self.texts:
            lines.append(f"{name}: long texts cut: {self.documents:,} pieces of {self.texts:,} texts")
        if self.overflows:
            lines.append(f"{name}: {self.overflows:,} numbers overflow and stay text, first {self.first_overflow}")
        return lines


class TextDataset:
    """Samples over flat arrays. `dataset[i]` is a `Sample`: a tuple of documents, one unless packed.

    A text of L tokens (its end token included) longer than sequence_length T is cut into pieces of T tokens that
    overlap by one, so each token but the first is predicted exactly once. With `pack`, whole pieces are put
    together to rows of at most T tokens (best fit, longest first; deterministic).

    Args: ids [L], values [L] float64, targets [L] bool: all texts in a row; text_bounds: [(start, end)] of each
    text in them; config: sequence_length, pack.
    Raises: UserError when sequence_length is below 2.
    """

    def __init__(
        self,
        ids: np.ndarray,
        values: np.ndarray,
        targets: np.ndarray,
        text_bounds: list[tuple[int, int]],
        config: DataConfig,
        tokenizer: NumericalAwareTokenizer,
        report: DataReport,
    ) -> None:
        self.pad_token_id, self.num_token_id = tokenizer.pad_token_id, tokenizer.num_token_id
        self.report = report
        self._ids, self._values, self._targets = ids, values, targets
        self._text_bounds, self._pack = text_bounds, config.pack
        self._cut(config.sequence_length)

    def _cut(self, length: int) -> None:
        if length < 2:
            raise UserError("data.sequence_length", length, "2 or more")
        self._bounds = [
            (cut, min(cut + length, end))
            for start, end in self._text_bounds
            for cut in range(start, end - 1, length - 1)
        ]
        self._rows = _pack([end - start for start, end in self._bounds], length) if self._pack else None
        self.report.documents, self.report.sequences = len(self._bounds), len(self)

    def with_length(self, length: int) -> TextDataset:
        """The same texts, shared in memory, cut and packed at another sequence length."""
        other = copy(self)
        other.report = replace(self.report)
        other._cut(length)
        return other

    def digest(self) -> str:
        """SHA-256 of all that samples are made of: ids, values, targets, how they are cut and packed."""
        found = hashlib.sha256()
        for part in (self._ids, self._values, self._targets, np.array(self._bounds, np.int64).reshape(-1, 2)):
            found.update(np.ascontiguousarray(part).data)
        found.update(repr(self._rows).encode())
        return found.hexdigest()

    def __len__(self) -> int:
        return len(self._bounds) if self._rows is None else len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        documents = [index] if self._rows is None else self._rows[index]
        return tuple(self._document(*self._bounds[i]) for i in documents)

    def _document(self, start: int, end: int) -> Document:
        return Document(self._ids[start:end], self._values[start:end], self._targets[start:end])

    def target_values(self) -> np.ndarray:
        """[M] float64: every value that the regression learns, once (seed S1 2: the statistics' input)."""
        return self._values[self._targets]

    def word_counts(self, vocab_size: int) -> np.ndarray:
        """[V] int64: how often each word occurs."""
        return np.bincount(self._ids, minlength=vocab_size)


def tokenise(texts: Iterable[Text], tokenizer: NumericalAwareTokenizer, config: DataConfig) -> TextDataset:
    """Texts to a dataset, an end token behind each.

    `config.numeric_targets` says which numbers are targets: all, or the last of each text; a number that opens a
    text is never one (nothing predicts it).
    Raises: UserError for a number that overflows unless config.on_nonfinite is skip, or no end token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError("model.tokenizer", "no end token", "a tokenizer with eos_token")
    report = DataReport()
    ids, values, targets = [np.zeros(0, np.int32)], [np.zeros(0)], [np.zeros(0, bool)]
    bounds: list[tuple[int, int]] = []
    for chunk in _chunks(texts):
        for text, encoded in zip(chunk, tokenizer.encode_batch([text.text for text in chunk]), strict=True):
            if encoded.overflows:
                where = f"{text.where}: {encoded.overflows[0][:40]}"
                if config.on_nonfinite == "error":
                    allowed = "numbers that float64 holds (data.on_nonfinite=skip leaves them as text)"
                    raise UserError("number", encoded.overflows[0], allowed, text.where)
                report.overflows += len(encoded.overflows)
                report.first_overflow = report.first_overflow or where
            new = np.array([*encoded.ids, end], np.int32)
            numbers = new == tokenizer.num_token_id
            learnt = numbers.copy()
            learnt[0] = False
            if config.numeric_targets == "last":
                learnt[: np.flatnonzero(learnt)[-1] if learnt.any() else 0] = False
            ids.append(new)
            values.append(np.array([*encoded.values, 0.0]))
            targets.append(learnt)
            bounds.append((report.tokens, report.tokens + len(new)))
            report.texts += 1
            report.tokens += len(new)
            report.numbers += int(numbers.sum())
            report.targets += int(learnt.sum())
    flat = np.concatenate(ids), np.concatenate(values), np.concatenate(targets)
    return TextDataset(*flat, bounds, config, tokenizer, report)


@dataclass(frozen=True)
class Datasets:
    """The training part and the held-out part (None when there is none), and how reading went."""

    train: TextDataset
    eval: TextDataset | None
    reading: ReadReport

    def lines(self) -> list[str]:
        """Both reports, one line each for what a person should know."""
        held_out = self.eval.report.lines("eval") if self.eval is not None else []
        return [*self.reading.lines(), *self.train.report.lines("train"), *held_out]


def load_datasets(config: DataConfig, tokenizer: NumericalAwareTokenizer) -> Datasets:
    """All that a run reads, tokenised. Raises: UserError, also when no text is left to train on."""
    report = ReadReport()
    train, held_out = read_split(config, report)
    if not train:
        raise UserError("data.train", "no usable text", "one text or more", str(config.train))
    evaluated = tokenise(held_out, tokenizer, config) if held_out else None
    return Datasets(tokenise(train, tokenizer, config), evaluated, report)


def _chunks(texts: Iterable[Text]) -> Iterator[list[Text]]:
    iterator = iter(texts)
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk


def _pack(lengths: list[int], capacity: int) -> list[list[int]]:
    """Rows of document numbers, each at most `capacity` tokens: longest first, into the fullest row that fits."""
    rows: list[list[int]] = []
    rows_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[document]
        space = next((s for s in range(length, capacity + 1) if rows_by_space[s]), None)
        if space is None:
            row, space = len(rows), capacity
            rows.append([])
        else:
            row = rows_by_space[space].pop()
        rows[row].append(document)
        rows_by_space[space - length].append(row)
    return rows
