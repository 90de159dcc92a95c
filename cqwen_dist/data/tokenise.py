"""Texts to an in-memory dataset: tokenised in chunks, filtered by length, counted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from cqwen_dist.config.data import DataConfig
from cqwen_dist.config.errors import UserError
from cqwen_dist.data.chunk import Chunk, Recipe, encode_chunk
from cqwen_dist.data.dataset import DataReport, TextDataset
from cqwen_dist.data.records import Text
from cqwen_dist.data.sources import chunks
from cqwen_dist.data.store import TokenStore
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer

_PLACES = 1000  # overflows whose places are kept


class Tokeniser:
    """Selects rows from tokenised chunks. Rejects or counts overflowing numbers."""

    def __init__(self, tokenizer: NumericalAwareTokenizer, config: DataConfig) -> None:
        """Raises: UserError for a tokenizer without an end token."""
        end = tokenizer.eos_token_id
        if end is None:
            raise UserError("model.tokenizer", "no end token", "a tokenizer with eos_token")
        begin = () if config.messages_field else tokenizer.begin  # a chat begins as its template begins it
        added = tokenizer.tokenizer.added_tokens_decoder.get(end)
        self.recipe = Recipe(tokenizer.encoder, begin, end, added and str(added), config.numeric_targets)
        self._least, self._most = config.min_tokens or 0, config.max_tokens or 2**62
        self._refuse = config.on_nonfinite == "error"
        self.rows = 0
        self.overflows: list[tuple[int, str]] = []  # the first few, as (row, message)

    def stays(self, chunk: Chunk, report: DataReport, new: np.ndarray) -> np.ndarray:
        """[n] bool: which of the chunk's `new` rows have an allowed length. Counts the excluded ones.

        Raises: UserError for a number that overflows, unless data.on_nonfinite is skip.
        """
        sizes = np.diff(chunk.batch.column("ids").offsets.to_numpy())
        too_short, too_long = new & (sizes < self._least), new & (sizes > self._most)
        stay = new & ~too_short & ~too_long
        for row, where, literal in chunk.overflows:
            if not stay[row]:
                continue
            if self._refuse:
                allowed = "numbers that float64 holds (data.on_nonfinite=skip leaves them as text)"
                raise UserError("number", literal, allowed, where)
            if len(self.overflows) < _PLACES:
                self.overflows.append((self.rows + int(stay[:row].sum()), f"{where}: {literal[:40]}"))
        self.rows += int(stay.sum())
        report.too_short += int(too_short.sum())
        report.too_long += int(too_long.sum())
        return stay


def tokenise(texts: Iterable[Text], tokenizer: NumericalAwareTokenizer, config: DataConfig) -> TextDataset:
    """Texts to an in-memory dataset, with an end token after each text. Raises as `Tokeniser`."""
    tokeniser, report, batches = Tokeniser(tokenizer, config), DataReport(), []
    for chunk in chunks(texts):
        encoded = encode_chunk(chunk, tokeniser.recipe)
        stays = tokeniser.stays(encoded, report, np.ones(len(chunk), bool))
        batches.append(encoded.batch.filter(pa.array(stays)))
    store = TokenStore(batches, tokenizer.num_token_id)
    count(report, store, None, tokeniser.overflows)
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
