"""Texts of sources (docs/data.md has their kinds), read lazily, split and mixed; errors name the line.

`data.blocks` makes records of a file, `data.records` makes a text of a record.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.blocks import blocks
from cqwen_dist.data.cells import BadLine
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.records import Block, Extractor, ReadReport, Text

CHUNK = 1000  # texts that are tokenised in one call
_DRAWS = 4096  # of sources, at a time


def read_texts(
    source: str, config: DataConfig, report: ReadReport, key: str = "data.train", chat: Chat | None = None
) -> Iterator[Text]:
    """The texts of one source in order.

    Raises: UserError for a source that is missing or cannot be read. For a bad line (no UTF-8, no JSON object, a field
    missing, empty or of a wrong type, too long, a compressed file that ends too early) UserError too, unless
    config.on_bad_line is skip; then it is counted in `report`.
    """
    extract = Extractor(config, chat or Chat())
    for block in blocks(source, config, key):
        yield from read_block(block, extract, report)


def read_block(block: Block, extract: Extractor, report: ReadReport) -> Iterator[Text]:
    """The texts of one block in order; bad lines are counted or raised as `read_texts` says."""
    for where, record in block():
        try:
            if isinstance(record, BadLine):
                raise record
            text = record if isinstance(record, Text) else extract(record, where)
        except BadLine as bad:
            if extract.config.on_bad_line != "skip":
                raise UserError(bad.kind, bad.found, bad.allowed, where) from None
            report.add(ReadReport(skipped={bad.kind: 1}, first={bad.kind: where}))
        except UserError as error:  # of a chat template, which all records meet
            raise UserError(error.key, error.found, error.allowed, where) from None
        else:
            report.read += 1
            yield text


def train_blocks(config: DataConfig, report: ReadReport, chat: Chat) -> Iterator[Block]:
    """`read_train` as blocks. Mixed and limited texts are read here, in the process that asks for blocks."""
    if config.weights is None and config.limit is None:
        for source in as_list(config.train):
            yield from blocks(source, config, "data.train")
        return
    for chunk in chunks(read_train(config, report, chat)):
        report.read -= len(chunk)  # `read_block` counts them again
        yield partial(list, [(text.where, text) for text in chunk])


def read_train(config: DataConfig, report: ReadReport, chat: Chat | None = None) -> Iterator[Text]:
    """The texts of data.train, mixed and limited as the config says."""
    sources = as_list(config.train)

    def open_source(index: int) -> Iterator[Text]:
        return read_texts(sources[index], config, report, "data.train", chat)

    texts: Iterator[Text]
    if config.weights is None:
        texts = (text for i in range(len(sources)) for text in open_source(i))
    else:
        texts = mixed(open_source, config.weights, config.mix_until == "all", config.mix_seed)
    for number, text in enumerate(texts, 1):
        yield text
        if number == config.limit:
            return


def mixed(
    open_source: Callable[[int], Iterator[Text]], weights: list[float], all_of: bool, seed: int
) -> Iterator[Text]:
    """Texts of several sources, each draw's source by weight; a function of the seed (MT19937) and the sources alone.

    Ends when a source is used up; with all_of: when every source was used up once, and short ones begin again.
    An empty source is drawn no more.
    """
    draw = np.random.RandomState(seed)
    shares = np.array(weights) / sum(weights)
    sources = [open_source(i) for i in range(len(weights))]
    given = [0] * len(weights)
    used_up = [False] * len(weights)
    while shares.sum() > 0:
        for i in draw.choice(len(weights), size=_DRAWS, p=shares / shares.sum()):
            text = next(sources[i], None)
            if text is None and given[i]:
                used_up[i] = True
                if not all_of or all(done or not share for done, share in zip(used_up, shares, strict=True)):
                    return
                sources[i] = open_source(i)
                text = next(sources[i], None)
            if text is None:
                shares[i] = 0.0
                used_up[i] = True
                break
            given[i] += 1
            yield text


def read_split(config: DataConfig, report: ReadReport, chat: Chat | None = None) -> tuple[list[Text], list[Text]]:
    """The training texts (the first `config.limit`) and the held-out texts, in memory.

    Without `config.eval`, `eval_fraction` of the training texts are held out: those whose SHA-256 is smallest,
    whatever their order, at least one, and equal texts stay on one side.
    Raises: what `read_texts` raises; UserError when the held-out part would be all.
    """
    train = list(read_train(config, report, chat))
    if config.deduplicate:
        first: dict[bytes, Text] = {}
        for text in train:
            first.setdefault(text_digest(text), text)
        report.duplicates += len(train) - len(first)
        train = list(first.values())
    if config.eval is not None:
        found = [text for one in as_list(config.eval) for text in read_texts(one, config, report, "data.eval", chat)]
        if not found:
            raise UserError("data.eval", "no usable text", "one text or more", str(config.eval))
        return train, found
    if not config.eval_fraction or not train:
        return train, []
    out = held_out(first_of_digests(map(text_digest, train)), config.eval_fraction)
    rest = [text for text, is_out in zip(train, out, strict=True) if not is_out]
    return rest, [text for text, is_out in zip(train, out, strict=True) if is_out]


def text_digest(text: Text) -> bytes:
    """SHA-256 of the text, its labels and its further values [32 bytes]."""
    extra = f"\0{text.labels}{text.more}" if text.labels or text.more else ""
    return hashlib.sha256((text.text + extra).encode()).digest()


def first_of_digests(digests: Iterable[bytes]) -> np.ndarray:
    """[n] uint64: the first 8 bytes of each digest, which differ between different texts."""
    return np.array([int.from_bytes(digest[:8], "big") for digest in digests], np.uint64)


def held_out(first: np.ndarray, fraction: float) -> np.ndarray:
    """Which texts are held out [n] bool: those with the smallest digests. Raises: UserError when it would be all.

    first: as `first_of_digests`.
    """
    count = math.ceil(fraction * len(first))
    out: np.ndarray = first <= np.partition(first, count - 1)[count - 1]
    if out.all():
        allowed = f"less, as {len(first)} texts leave none to train on"
        raise UserError("data.eval_fraction", fraction, allowed)
    return out


def chunks(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """Texts in lists of CHUNK, or fewer where they are long."""
    chunk: list[Text] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text.text)
        if len(chunk) == CHUNK or size >= 1 << 22:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def as_list(sources: str | list[str]) -> list[str]:
    """One source or several, as a list."""
    return [sources] if isinstance(sources, str) else sources
