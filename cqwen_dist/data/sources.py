"""Texts from sources (docs/data.md lists the kinds), read lazily and split. Errors name the line.

`data.blocks` converts files to records, `data.records` converts records to texts.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import pyarrow as pa

from cqwen_dist.config.data import DataConfig, as_list
from cqwen_dist.config.errors import BadLine, UserError
from cqwen_dist.data.blocks import blocks, in_blocks
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.columns import columns_for, forms_by
from cqwen_dist.data.records import Block, Extractor, ReadReport, Text
from cqwen_dist.data.store import first_of_digests

CHUNK = 1000  # texts tokenised per call


def read_texts(
    source: str, config: DataConfig, report: ReadReport, key: str = "data.train", chat: Chat | None = None
) -> Iterator[Text]:
    """Yield a source's texts in order.

    Raises: UserError for a missing or unreadable source, and for a bad line (not UTF-8, not a JSON object, a field that
    is missing, empty or has a wrong type, too long, truncated gzip) unless config.on_bad_line is skip; then `report`
    counts it.
    """
    extract = extractor_of(config, report, chat)
    for block in blocks(source, config, key):
        yield from read_block(block, extract, report)


def extractor_of(config: DataConfig, report: ReadReport, chat: Chat | None = None) -> Extractor:
    """The extractor with the forms of the config's columns. The report keeps the columns' kinds."""
    if report.columns is None:
        report.columns = columns_for(config)
    return Extractor(config, chat or Chat(), forms_by(config, report.columns), report.columns)


def read_block(block: Block, extract: Extractor, report: ReadReport) -> Iterator[Text]:
    """Yield a block's texts in order. Bad lines are counted or raised as in `read_texts`."""
    for where, record in block:
        try:
            if isinstance(record, BadLine):
                raise record
            text = record if isinstance(record, Text) else extract(record, where)
        except BadLine as bad:
            if extract.config.on_bad_line != "skip":
                raise UserError(bad.kind, bad.found, bad.allowed, where) from None
            report.add(ReadReport(skipped={bad.kind: 1}, first={bad.kind: where}))
        except UserError as error:  # a broken chat template fails for every record, so it is never skipped
            raise UserError(error.key, error.found, error.allowed, where) from None
        else:
            report.read += 1
            if text is not record:  # a text read before was counted then
                for kind in text.unused:
                    report.unused[kind] = report.unused.get(kind, 0) + 1
                    report.first.setdefault(kind, where)
            yield text


def train_blocks(config: DataConfig, report: ReadReport, chat: Chat) -> Iterator[Block]:
    """`read_train` as blocks. Limited texts are read in the calling process."""
    if config.limit is None:
        for source in as_list(config.train):
            yield from blocks(source, config, "data.train")
        return
    for chunk in chunks(read_train(config, report, chat)):
        report.read -= len(chunk)  # `read_block` counts them again
        yield [(text.where, text) for text in chunk]


def read_train(config: DataConfig, report: ReadReport, chat: Chat | None = None) -> Iterator[Text]:
    """Yield data.train's texts, one source after the other, at most data.limit."""
    sources = as_list(config.train)
    texts = (text for source in sources for text in read_texts(source, config, report, "data.train", chat))
    return islice(texts, config.limit)


def read_split(config: DataConfig, report: ReadReport, chat: Chat | None = None) -> tuple[list[Text], list[Text]]:
    """Training texts (the first `config.limit`) and held-out texts, in memory.

    Without `config.eval`, a share `eval_fraction` of the training texts is held out: those with the smallest SHA-256,
    at least one. So the choice does not depend on order, and equal texts stay on one side. Raises as `read_texts`;
    UserError if every text would be held out.
    """
    train = list(read_train(config, report, chat))
    if config.eval is not None:
        return train, [t for one in as_list(config.eval) for t in read_texts(one, config, report, "data.eval", chat)]
    if not config.eval_fraction or not train:
        return train, []
    out = held_out(first_of_digests(pa.array(map(text_digest, train), pa.binary(32))), config.eval_fraction)
    rest = [text for text, is_out in zip(train, out, strict=True) if not is_out]
    return rest, [text for text, is_out in zip(train, out, strict=True) if is_out]


def text_digest(text: Text) -> bytes:
    """SHA-256 of the text [32 bytes]."""
    return hashlib.sha256(text.text.encode()).digest()


def held_out(first: np.ndarray, fraction: float) -> np.ndarray:
    """[n] bool: texts with the smallest digests. Raises: UserError if every text would be held out.

    first: from `store.first_of_digests`.
    """
    count = math.ceil(fraction * len(first))
    # A threshold, not the first `count` indices: equal texts have equal digests and must stay on one side.
    out: np.ndarray = first <= np.partition(first, count - 1)[count - 1]
    if out.all():
        raise UserError("data.eval_fraction", fraction, f"less, as {len(first)} texts leave none to train on")
    return out


def chunks(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """Yield lists of CHUNK texts, fewer if they are long."""
    return in_blocks(((text, len(text.text)) for text in texts), CHUNK, 1 << 22)
