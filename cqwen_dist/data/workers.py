"""Blocks tokenised in their order, in this process or in several; torch and transformers are not imported for it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_context
from typing import Any

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.chunk import Chunk, Recipe, encode_chunk
from cqwen_dist.data.encoder import NumberEncoder
from cqwen_dist.data.records import Block, ReadReport, extractor
from cqwen_dist.data.sources import read_block

_AHEAD = 2  # blocks a worker has waiting
_WORTH = 8  # blocks from which on it is worth to start workers (a second or two each)

Done = tuple[Chunk, ReadReport]


class BlockWork:
    """What becomes of a block: its texts, tokenised, and how reading went."""

    def __init__(self, config: DataConfig, chat: Chat, encoder: NumberEncoder, recipe: Recipe) -> None:
        self.given = config, chat, encoder, recipe
        self._extract, self._skip = extractor(config, chat), config.on_bad_line == "skip"

    def __call__(self, block: Block) -> Done:
        """Raises: UserError for a bad line unless they are to be skipped."""
        report = ReadReport()
        texts = list(read_block(block, self._extract, self._skip, report))
        return encode_chunk(texts, *self.given[2:]), report


def worked(blocks: Iterator[Block], work: BlockWork, workers: int) -> Iterator[Done]:
    """What became of each block, in order; with several workers so many are ahead that each has two.

    Raises: what reading and tokenising raise, at the block's turn; UserError for a worker that was killed.
    """
    first = list(islice(blocks, _WORTH)) if workers > 1 else []
    blocks = chain(first, blocks)
    if len(first) < _WORTH:
        yield from map(work, blocks)
        return
    waiting: deque[Future[Done]] = deque()
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start, initargs=work.given) as pool:
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


_worker: dict[str, Any] = {}


def _start(config: DataConfig, chat: Chat, encoder: NumberEncoder, recipe: Recipe) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker["work"] = BlockWork(config, chat, encoder, recipe)


def _work(block: Block) -> Done:
    done: Done = _worker["work"](block)
    return done
