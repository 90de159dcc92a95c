"""Which models can be a base, and why others cannot (docs/bases.md); and where a vocabulary has a row for <NUM>."""

from __future__ import annotations

from collections.abc import Mapping

from cqwen_dist.config.errors import Said, UserError

# What a base model's `model_type` may be (Qwen2.5 is qwen2, SmolLM2 llama).
ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral")
BLOCK = 64  # rows are added up to a multiple of it

_OTHER = "its blocks are not a Llama's"
_WHY = {
    "moe": "it has experts, and adapters and plan know one map a place",
    "mixtral": "it has experts, and adapters and plan know one map a place",
    "gemma": "it scales embeddings inside its transformer, and the later ones bend their logits",
    "phi3": "q, k and v are one map",
    "gpt": "positions are learnt, and its maps have other names",
    "vl": "its text model lies inside another",
    "llama4": "it has experts, and its text model lies inside another",
    "mistral3": "its text model lies inside another",
    "qwen3_5": "part of its attention is recurrent",
    "qwen3_next": "part of its attention is recurrent, and it has experts",
    "mamba": "it has no attention",
}


def check_model_type(kind: object, key: str, where: str = "") -> None:
    """Raises `UserError`, with the reason, for a model type that is no base."""
    if kind in ARCHITECTURES:
        return
    if kind is None:
        raise UserError(key, Said("no value"), _allowed(), where)
    why = next((why for part, why in _WHY.items() if part in str(kind)), _OTHER)
    raise UserError(key, kind, f"{_allowed()} ({why}: docs/bases.md)", where)


def _allowed() -> str:
    return f"{', '.join(ARCHITECTURES[:-1])} or {ARCHITECTURES[-1]}"


def numeral_ids(vocabulary: Mapping[str, int]) -> list[int]:
    """The tokens that a tokenizer spells numerals with: all of digits, a space before them or not. Ascending.

    Ten in Qwen and SmolLM2, which cut numerals into digits; every group of up to three digits in Llama 3.
    """
    words = ((token.lstrip("\u0120\u2581"), i) for token, i in vocabulary.items())  # Ġ ▁: a space
    return sorted(i for word, i in words if word.isascii() and word.isdigit())


def rows_with_number(vocab_size: int, used: int, num_token_id: int) -> int:
    """Rows of a vocabulary in which <NUM> has one: as many as there are, more where words use every one of them.

    used: rows that the tokenizer uses. Raises `UserError` where the two do not fit.
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
