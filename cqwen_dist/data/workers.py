"""Blocks tokenised in order, in this process or in several; imports no torch, no transformers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_context
from typing import NamedTuple

from cqwen_dist.config import UserError
from cqwen_dist.data.chunk import Chunk, Recipe, encode_chunk
from cqwen_dist.data.records import Block, Extractor, ReadReport
from cqwen_dist.data.sources import read_block

_AHEAD = 2  # blocks that wait for each worker
_WORTH = 8  # fewer blocks are not worth the start of workers (a second or two each)

Done = tuple[Chunk, ReadReport]


class BlockWork(NamedTuple):
    """Reads a block and tokenises its texts; pickled once for each worker process."""

    extract: Extractor
    recipe: Recipe

    def __call__(self, block: Block) -> Done:
        """Raises: UserError for a bad line unless they are to be skipped."""
        report = ReadReport()
        return encode_chunk(list(read_block(block, self.extract, report)), self.recipe), report


def worked(blocks: Iterator[Block], work: BlockWork, workers: int) -> Iterator[Done]:
    """The result of each block, in order; several workers are kept busy with two blocks each.

    Raises: what reading and tokenising raise, at the block's turn; UserError for a worker that was killed.
    """
    first = list(islice(blocks, _WORTH)) if workers > 1 else []
    blocks = chain(first, blocks)
    if len(first) < _WORTH:
        yield from (work(block) for block in blocks)
        return
    waiting: deque[Future[Done]] = deque()
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start, initargs=(work,)) as pool:
        try:
            for block in blocks:
                waiting.append(pool.submit(_work, block))
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


_worker: list[BlockWork] = []


def _start(work: BlockWork) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker.append(work)


def _work(block: Block) -> Done:
    return _worker[0](block)
