"""A base's vocabulary: the row for <NUM>, and tokens for numerals and line breaks."""

from collections.abc import Iterable, Mapping
from typing import Any

from cqwen_dist.config.errors import UserError
from cqwen_dist.config.shape import A_TOKEN, SIGNS

POLICY_FILE = "number_policy.json"  # written with a tokenizer for numbers
AS_SIGN = {sign: sign for sign in SIGNS} | dict(zip("加−减x×乘÷除（）＝", "+--***//()=", strict=True))  # as in prose
SPACE = " \u00a0$<>"  # may stand between signs: GSM8K writes <<48/2=24>>
BLOCK = 64  # an extended vocabulary has a multiple of this number of rows


def rows_used(tokenizer: Any) -> int:
    """Number of rows that a transformers tokenizer uses."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def numeral_ids(vocabulary: Mapping[str, int]) -> list[int]:
    """Ids of tokens that consist of digits, with or without a leading space, ascending.

    Ten in Qwen and SmolLM2, which split numerals into digits; every group of up to three digits in Llama 3.
    """
    words = ((token.lstrip("\u0120\u2581"), i) for token, i in vocabulary.items())  # Ġ and ▁ stand for a space
    return sorted(i for word, i in words if word.isascii() and word.isdigit())


def rows_with_number(vocab_size: int, used: int, num_token_id: int) -> int:
    """Number of vocabulary rows including <NUM>: `vocab_size`, or the next block behind the words if they use all rows.

    used: rows used by the tokenizer; one more than there are, as Gemma 3's has a token for images that its text models
    lack. Raises `UserError` if <NUM> or the tokenizer does not fit.
    """
    rows = vocab_size
    if vocab_size <= min(used, num_token_id) and used <= vocab_size + 1:
        rows = (used // BLOCK + 1) * BLOCK
    if max(num_token_id + 1, used) > rows:
        found = f"no row for <NUM>: id {num_token_id} of a tokenizer with {used} words"
        raise UserError("model.num_token_id", found, f"ids below the model's vocabulary size {rows}")
    return rows


def line_end_ids(vocabulary: Mapping[str, int]) -> list[int]:
    """Tokens with a line break: as text, in byte-level BPE's spelling, or as a byte token."""
    return sorted(
        token_id for token, token_id in vocabulary.items() if {"\n", "\u010a"} & {*token} or token == "<0x0A>"
    )


def symbols_of(words: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """The tokens (text, id) that only have signs of arithmetic, by these signs: {")=": [8, 15], "": [220]}."""
    found: dict[str, list[int]] = {}
    for text, token in words:
        signs = [AS_SIGN.get(sign, sign) for sign in text if sign not in SPACE]
        if text and len(signs) <= A_TOKEN and all(sign in SIGNS for sign in signs):
            found.setdefault("".join(signs), []).append(token)
    return {signs: sorted(tokens) for signs, tokens in sorted(found.items())}
