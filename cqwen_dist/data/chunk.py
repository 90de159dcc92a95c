"""Texts to `cqwen_dist.data.store.SCHEMA` rows: ids, numbers, learnt tokens.

Blocks are processed in order, in this process or in worker processes. Workers start quickly because this module imports
neither torch nor transformers.
"""

import os
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import accumulate, chain, islice, pairwise
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from cqwen_dist.config.errors import UserError
from cqwen_dist.data.encoder import NumberEncoder, Reading
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.records import Block, Extractor, ReadReport, Text
from cqwen_dist.data.sources import read_block, text_digest
from cqwen_dist.data.store import SCHEMA

_AHEAD = 2  # blocks queued per worker
_WORTH = 8  # starting workers takes a second or two each: not worth it for fewer blocks


class Recipe(NamedTuple):
    """Settings that turn a text into a row. Pickled for worker processes."""

    encoder: NumberEncoder
    begin: tuple[int, ...]  # ids before each text that does not begin with them
    end: int  # id of the end token, appended to each text that does not end with it
    end_text: str | None  # the same token in a text; None if the letters are read as words
    numeric_targets: str


# Tokenised texts, one row each, and the numbers too large for float64, which stay text, as (row, place)
Chunk = tuple[pa.RecordBatch, list[tuple[int, str]]]


def encode_chunk(texts: Sequence[Text], recipe: Recipe) -> Chunk:
    """Tokenise texts, from `begin` to one end token."""
    segments = [_segments(text) for text in texts]
    # All segments of all texts in one call
    readings = iter(recipe.encoder.read([segment for own in segments for segment, _ in own]))
    rows, overflows = [], []
    for i, (text, own) in enumerate(zip(texts, segments, strict=True)):
        found = list(islice(readings, len(own)))
        rows.append(_row(text, own, found, recipe))
        overflows += [(i, f"{text.where}: {word[:40]}") for reading in found for word in reading.overflows]
    columns = [pa.array([row[field.name] for row in rows], field.type) for field in SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA), overflows


def _row(text: Text, segments: list[tuple[str, bool]], readings: list[Reading], recipe: Recipe) -> dict[str, Any]:
    """A text's row of `SCHEMA`. segments: with whether each is learnt; readings: of the segments."""
    parts, learnt = [reading.ids for reading in readings], [is_learnt for _, is_learnt in segments]
    begin = array("i", recipe.begin)
    if parts[0][: len(begin)] != begin:
        parts[0] = begin + parts[0]
    # Chat templates write the end token themselves, often with a line end after it.
    if recipe.end_text is None or not text.text.rstrip().endswith(recipe.end_text):
        parts[-1] = parts[-1] + array("i", [recipe.end])
    ends = list(accumulate(map(len, parts), initial=0))
    ids = np.frombuffer(b"".join(parts), np.int32)
    targets = _targets(text, segments, readings, recipe)
    if ids[0] == recipe.encoder.num_token_id:
        targets[0] = 0  # no token precedes it
    return {
        "ids": ids,
        "numbers": [number for reading in readings for number in reading.numbers],
        "targets": targets,
        "unlearnt": _unlearnt(learnt, ends, np.flatnonzero(ids == recipe.encoder.num_token_id), readings),
        "overflows": sum(len(reading.overflows) for reading in readings),
        "left": sum(reading.left for reading in readings),
        "digest": text_digest(text),
    }


def _unlearnt(learnt: list[bool], ends: list[int], numbers: np.ndarray, readings: list[Reading]) -> list[int]:
    """start, end, start, end, ...: segments that are not learnt, and the digits given behind a <NUM> in the others.

    learnt: of each segment; ends: of the segments, after 0; numbers: places of <NUM>.
    """
    found = [(start, end) for is_learnt, start, end in zip(learnt, ends, ends[1:], strict=False) if not is_learnt]
    given = [count * is_learnt for is_learnt, reading in zip(learnt, readings, strict=True) for count in reading.given]
    found += [(at + 1, at + 1 + count) for at, count in zip(numbers.tolist(), given, strict=True) if count]
    return list(chain.from_iterable(sorted(found)))


def _targets(text: Text, segments: list[tuple[str, bool]], readings: list[Reading], recipe: Recipe) -> np.ndarray:
    """[M] int8: 1 for each number of the text that is learnt."""
    learnt = np.array([is_learnt for _, is_learnt in segments], np.int8)
    targets = np.repeat(learnt, [len(reading.numbers) for reading in readings])
    if recipe.numeric_targets == "last":
        targets[:-1] = 0
    if text.target is not None:
        targets *= _inside(segments, text.target, recipe.encoder)
    return targets


def _segments(text: Text) -> list[tuple[str, bool]]:
    """(piece, whether it is learnt) of a text."""
    if text.learnt is None:
        return [(text.text, True)]
    ends = (0, *chain.from_iterable(text.learnt), len(text.text))
    return [(text.text[a:b], place % 2 == 1) for place, (a, b) in enumerate(pairwise(ends)) if a < b]


def _inside(segments: list[tuple[str, bool]], target: tuple[int, int], encoder: NumberEncoder) -> np.ndarray:
    """[M] bool: whether each number lies within the characters of `target`."""
    found, position = [], 0
    for segment, _ in segments:
        for start, end, value in find_numbers(segment, encoder.policy) if encoder.policy is not None else ():
            if np.isfinite(value):
                found.append(target[0] <= position + start and position + end <= target[1])
        position += len(segment)
    return np.array(found, bool)


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
            allowed = "processes that live; cqwen prepare --workers 1 takes the least memory"
            raise UserError("workers", "no living process: one was killed", allowed) from None
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
