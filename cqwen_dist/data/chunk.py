"""Texts to `cqwen_dist.data.store.SCHEMA` rows: ids, numbers, learnt tokens, target types.

Blocks are processed in order, in this process or in worker processes. Workers start quickly because this module imports
neither torch nor transformers.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import accumulate, chain, islice
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from cqwen_dist.config.errors import UserError
from cqwen_dist.data.encoder import NumberEncoder, Reading
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.records import Block, Extractor, ReadReport, Text
from cqwen_dist.data.sources import read_block, text_digest
from cqwen_dist.data.store import SCHEMA, offsets_of

_AHEAD = 2  # blocks queued per worker
_WORTH = 8  # starting workers takes a second or two each: not worth it for fewer blocks


class Recipe(NamedTuple):
    """Settings that turn a text into a row. Pickled for worker processes."""

    encoder: NumberEncoder
    begin: tuple[int, ...]  # ids before each text that does not begin with them
    end: int  # id of the end token, appended to each text that does not end with it
    end_text: str | None  # the same token in a text; None if the letters are read as words
    numeric_targets: str


class Chunk(NamedTuple):
    """Tokenised texts, one row each, and overflowing numbers as (row, place, literal)."""

    batch: pa.RecordBatch
    overflows: list[tuple[int, str, str]]


class _Row(NamedTuple):
    """A text, its segments with whether each is learnt, a reading per segment, and the tokens that are not learnt."""

    text: Text
    segments: list[tuple[str, bool]]
    readings: list[Reading]
    unlearnt: list[int]  # start, end, start, end, ...


def encode_chunk(texts: Sequence[Text], recipe: Recipe) -> Chunk:
    """Tokenise texts, from `begin` to one end token. A number at position 0 is no target: no token precedes it."""
    encoder = recipe.encoder
    rows = _read(texts, recipe)
    ids = [b"".join([reading.ids for reading in row.readings]) for row in rows]  # int32 bytes
    offsets = offsets_of([len(own) // 4 for own in ids])
    flat = np.frombuffer(b"".join(ids), np.int32)
    numbers = np.fromiter(chain.from_iterable(r.numbers for row in rows for r in row.readings), np.float64)
    numbers_at, targets = _targets(rows, flat, offsets, recipe)
    overflows = [(i, row.text.where, word) for i, row in enumerate(rows) for r in row.readings for word in r.overflows]
    columns = [
        _lists(flat, offsets),
        _lists(numbers, numbers_at),
        _lists(targets, numbers_at),
        _nested([row.unlearnt for row in rows], np.int32),
        _nested([_labels(text, encoder) for text in texts], np.int32),
        _nested([text.more for text in texts], np.float64),
        pa.array(np.bincount(np.array([i for i, *_ in overflows], np.int64), minlength=len(rows)), pa.int32()),
        pa.array([sum(reading.left for reading in row.readings) for row in rows], pa.int32()),
        pa.array(map(text_digest, texts), pa.binary(32)),
    ]
    return Chunk(pa.RecordBatch.from_arrays(columns, schema=SCHEMA), overflows)


def _labels(text: Text, encoder: NumberEncoder) -> list[int]:
    """Partial labels of a text, encoded as in `SCHEMA`. Raises `UserError` for a word with multiple tokens."""
    found = []
    for (word, holds), reading in zip(text.labels, encoder.read([word for word, _ in text.labels]), strict=True):
        if len(reading.ids) != 1:
            raise UserError("data.labels_field", word, "words of one token, mostly with the space before", text.where)
        found.append(reading.ids[0] if holds else ~reading.ids[0])
    return found


def _targets(rows: list[_Row], flat: np.ndarray, offsets: np.ndarray, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Returns numbers_at [n+1], each row's offset into all numbers, and targets [M] int8: 1 + type, 0 if not learnt."""
    places = np.flatnonzero(flat == recipe.encoder.num_token_id)
    owner = np.searchsorted(offsets, places, "right") - 1
    numbers_at = offsets_of(np.bincount(owner, minlength=len(rows)))
    targets = (places > offsets[owner]).astype(np.int8)
    if recipe.numeric_targets == "last":
        # Keep a number only if the next one belongs to a different text.
        targets[:-1] *= owner[1:] != owner[:-1]
    for i, row in enumerate(rows):
        mine = slice(numbers_at[i], numbers_at[i + 1])
        if row.unlearnt:
            targets[mine] *= np.repeat([learnt for _, learnt in row.segments], [len(r.numbers) for r in row.readings])
        if row.text.target is not None:
            targets[mine] *= _inside(row.segments, row.text.target, recipe.encoder)
        for kind, span in enumerate(row.text.typed, 1):
            # A product, so numbers that are not learnt stay 0.
            targets[mine] *= np.where(_inside(row.segments, span, recipe.encoder), 1 + kind, 1).astype(np.int8)
        if row.text.more and targets[mine].sum() != 1:
            found, allowed = int(targets[mine].sum()), "one number in data.target_field, with data.more_values"
            raise UserError("data.target_field", f"{found} numbers", allowed, row.text.where)
    return numbers_at, targets


def _read(texts: Sequence[Text], recipe: Recipe) -> list[_Row]:
    """Encode all segments of all texts in one call. The first has the beginning, the last the end token."""
    segments = [_segments(text) for text in texts]
    readings = iter(recipe.encoder.read([segment for own in segments for segment, _ in own]))
    begin = array("i", recipe.begin)
    rows = []
    for text, own in zip(texts, segments, strict=True):
        found = list(islice(readings, len(own)))
        if found[0].ids[: len(begin)] != begin:
            found[0] = found[0]._replace(ids=begin + found[0].ids)
        # Chat templates write the end token themselves, often with a line end after it.
        if recipe.end_text is None or not text.text.rstrip().endswith(recipe.end_text):
            found[-1] = found[-1]._replace(ids=found[-1].ids + array("i", [recipe.end]))
        rows.append(_Row(text, own, found, _unlearnt(text, own, found)))
    return rows


def _segments(text: Text) -> list[tuple[str, bool]]:
    """Split a text where learning starts or stops: (piece, whether it is learnt)."""
    if text.learnt is None:
        return [(text.text, True)]
    pieces, position = [], 0
    for start, end in text.learnt:
        pieces += [(text.text[position:start], False), (text.text[start:end], True)]
        position = end
    pieces.append((text.text[position:], False))
    return [piece for piece in pieces if piece[0]]


def _unlearnt(text: Text, segments: list[tuple[str, bool]], readings: list[Reading]) -> list[int]:
    """Token ranges that are not learnt, as start, end, start, end, ..."""
    if text.learnt is None:
        return []
    ends = list(accumulate([len(reading.ids) for reading in readings], initial=0))
    return [end for i, (_, learnt) in enumerate(segments) if not learnt for end in ends[i : i + 2]]


def _inside(segments: list[tuple[str, bool]], target: tuple[int, int], encoder: NumberEncoder) -> np.ndarray:
    """[M] bool: whether each number lies within the characters of `target`."""
    found, position = [], 0
    for segment, _ in segments:
        for start, end, value in find_numbers(segment, encoder.policy) if encoder.policy is not None else ():
            if np.isfinite(value):
                found.append(target[0] <= position + start and position + end <= target[1])
        position += len(segment)
    return np.array(found, bool)


def _lists(values: np.ndarray, offsets: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))


def _nested(rows: Sequence[Sequence[float]], dtype: Any) -> pa.ListArray:
    """Column with one list per row."""
    return _lists(np.fromiter(chain.from_iterable(rows), dtype), offsets_of([len(row) for row in rows]))


# ------------------------------------------------------------------------------------------------- multiple processes

Done = tuple[Chunk, ReadReport]


def encode_block(block: Block, extract: Extractor, recipe: Recipe) -> Done:
    """Read a block and tokenise its texts. Raises as `read_block` and `encode_chunk`."""
    report = ReadReport()
    return encode_chunk(list(read_block(block, extract, report)), recipe), report


def encode_blocks(blocks: Iterator[Block], extract: Extractor, recipe: Recipe, workers: int) -> Iterator[Done]:
    """`encode_block` for each block, in order. Each worker has up to two blocks queued.

    Raises: errors of `encode_block`, when the block's turn comes; UserError if a worker was killed.
    """
    first = list(islice(blocks, _WORTH)) if workers > 1 else []
    blocks = chain(first, blocks)
    if len(first) < _WORTH:
        yield from (encode_block(block, extract, recipe) for block in blocks)
        return
    waiting: deque[Future[Done]] = deque()
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start, initargs=(extract, recipe)) as pool:
        try:
            for block in blocks:
                waiting.append(pool.submit(_work, block))
                # Bound the queue, because finished chunks stay in memory until their turn.
                if len(waiting) > _AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            allowed = "processes that live; fewer (data.workers) take less memory"
            raise UserError("data.workers", "no living process: one was killed", allowed) from None
        finally:
            for future in waiting:
                future.cancel()


_of_worker: list[tuple[Extractor, Recipe]] = []  # sent once per worker process, not with each block


def _start(extract: Extractor, recipe: Recipe) -> None:
    # The workers already use all cores, so each one tokenises in a single thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _of_worker.append((extract, recipe))


def _work(block: Block) -> Done:
    return encode_block(block, *_of_worker[0])
