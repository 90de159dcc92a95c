"""Texts to an in-memory dataset: tokenised in chunks, counted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from cqwen_dist.config.data import DataConfig
from cqwen_dist.config.errors import UserError
from cqwen_dist.data.chunk import Recipe, encode_chunk
from cqwen_dist.data.dataset import DataReport, TextDataset
from cqwen_dist.data.records import Text
from cqwen_dist.data.sources import chunks
from cqwen_dist.data.store import TokenStore
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer


def recipe_of(tokenizer: NumericalAwareTokenizer, config: DataConfig) -> Recipe:
    """How texts become rows. Raises: UserError for a tokenizer without an end token."""
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError("model.tokenizer", "no end token", "a tokenizer with eos_token")
    begin = () if config.messages_field else tokenizer.begin  # a chat begins as its template begins it
    added = tokenizer.tokenizer.added_tokens_decoder.get(end)
    return Recipe(tokenizer.encoder, begin, end, added and str(added), config.numeric_targets)


def tokenise(texts: Iterable[Text], tokenizer: NumericalAwareTokenizer, config: DataConfig) -> TextDataset:
    """Texts to an in-memory dataset, with an end token after each text. Raises as `recipe_of`."""
    recipe, report, rows = recipe_of(tokenizer, config), DataReport(), 0
    batches: list[pa.RecordBatch] = []
    overflows: list[tuple[int, str]] = []
    for chunk in chunks(texts):
        encoded = encode_chunk(chunk, recipe)
        overflows += [(rows + row, said) for row, said in encoded.overflows]
        rows += len(chunk)
        batches.append(encoded.batch)
    store = TokenStore(batches, tokenizer.num_token_id)
    count(report, store, None, overflows)
    return TextDataset(store, None, config, tokenizer.pad_token_id, report)


def count(report: DataReport, store: TokenStore, texts: np.ndarray | None, overflows: list[tuple[int, str]]) -> None:
    """Fill in a report's totals for the given texts in a store."""
    own = slice(None) if texts is None else texts
    report.texts = len(store.lengths[own])
    report.tokens = int(store.lengths[own].sum(dtype=np.int64))
    report.numbers = sum(map(len, store.parts("numbers", texts)))
    report.targets = sum(map(len, store.parts("targets", texts)))
    report.overflows = int(store.column("overflows")[own].sum(dtype=np.int64))
    report.left = int(store.column("left")[own].sum(dtype=np.int64))
    report.first_overflow = next((place for row, place in overflows if texts is None or row in texts), "")
