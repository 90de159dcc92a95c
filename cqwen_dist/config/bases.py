"""Which models can be a base, and why others cannot (docs/bases.md); the row for <NUM> in a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

from cqwen_dist.config.errors import Said, UserError

# The `model_type` of a base model (Qwen2.5 is qwen2, SmolLM2 llama).
ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral")
BLOCK = 64  # rows are added up to the next multiple

_OTHER = "its blocks are not a Llama's"
_WHY = {
    "moe": "it has experts; adapters and planner expect one linear map in each place",
    "mixtral": "it has experts; adapters and planner expect one linear map in each place",
    "gemma": "it scales embeddings inside its transformer, and later versions cap their logits",
    "phi3": "q, k and v are one linear map",
    "gpt": "positions are learnt, and its linear maps have other names",
    "vl": "its text model is part of a larger one",
    "llama4": "it has experts, and its text model is part of a larger one",
    "mistral3": "its text model is part of a larger one",
    "qwen3_5": "part of its attention is recurrent",
    "qwen3_next": "part of its attention is recurrent, and it has experts",
    "mamba": "it has no attention",
}


def check_model_type(kind: object, key: str, where: str = "") -> None:
    """Raises `UserError`, with the reason, for a model type that is no base."""
    if kind in ARCHITECTURES:
        return
    allowed = f"{', '.join(ARCHITECTURES[:-1])} or {ARCHITECTURES[-1]}"
    if kind is None:
        raise UserError(key, Said("no value"), allowed, where)
    why = next((why for part, why in _WHY.items() if part in str(kind)), _OTHER)
    raise UserError(key, kind, f"{allowed} ({why}: docs/bases.md)", where)


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
