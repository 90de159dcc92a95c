"""A base's vocabulary: the row for <NUM>, the words that spell numerals and line breaks."""

from __future__ import annotations

from collections.abc import Mapping

from cqwen_dist.config.errors import UserError

BLOCK = 64  # rows are added up to the next multiple


def numeral_ids(vocabulary: Mapping[str, int]) -> list[int]:
    """The ids of tokens made of digits, with or without a space before them, ascending.

    Ten in Qwen and SmolLM2, which cut numerals into digits; every group of up to three digits in Llama 3.
    """
    words = ((token.lstrip("\u0120\u2581"), i) for token, i in vocabulary.items())  # Ġ ▁: a space
    return sorted(i for word, i in words if word.isascii() and word.isdigit())


def rows_with_number(vocab_size: int, used: int, num_token_id: int) -> int:
    """Rows of a vocabulary with a row for <NUM>: `vocab_size`, or a block more where words use all rows.

    used: rows that the tokenizer uses. Raises `UserError` where <NUM> or the tokenizer does not fit.
    """
    rows = vocab_size
    if used == vocab_size <= num_token_id:
        rows = (vocab_size // BLOCK + 1) * BLOCK
    if max(num_token_id + 1, used) > rows:
        raise UserError(
            "model.num_token_id",
            f"no row for <NUM>: id {num_token_id} of a tokenizer with {used} words",
            f"ids below the model's vocabulary size {rows}",
        )
    return rows


def line_end_ids(vocabulary: Mapping[str, int]) -> list[int]:
    """The tokens of a vocabulary that hold a line break, as text, as byte-level BPE writes it, or as a byte."""
    return sorted(
        token_id for token, token_id in vocabulary.items() if {"\n", "\u010a"} & {*token} or token == "<0x0A>"
    )
