"""Architectures that can be a base: one file each, listed in `ARCHITECTURES` (floor 0: data, no torch)."""

from __future__ import annotations

from cqwen_dist.config.architectures.base_architecture import BaseArchitecture
from cqwen_dist.config.architectures.llama import LLAMA
from cqwen_dist.config.architectures.mistral import MISTRAL
from cqwen_dist.config.architectures.qwen2 import QWEN2
from cqwen_dist.config.architectures.qwen3 import QWEN3
from cqwen_dist.config.errors import Said, UserError

ARCHITECTURES = {each.model_type: each for each in (QWEN2, QWEN3, LLAMA, MISTRAL)}
USUAL = "qwen2"  # for benchmarks, and if no base is named
# Linear layers that can have an adapter in at least one of them
LINEARS = tuple(dict.fromkeys(name for each in ARCHITECTURES.values() for name in each.linears))
_EXPERTS = "it has experts; adapters and the planner expect one linear map in each place"
_NESTED = "its text model is part of a larger one"
# Why others cannot be a base. Substring of the `model_type` -> reason; the first match counts.
_REASONS = {
    "moe": _EXPERTS,
    "mixtral": _EXPERTS,
    "gemma": "it scales embeddings inside its transformer, and later versions cap their logits",
    "phi3": "q, k and v are one linear map",
    "gpt": "it learns positions, and its linear maps have other names",
    "vl": _NESTED,
    "llama4": "it has experts, and its text model is part of a larger one",
    "mistral3": _NESTED,
    "qwen3_5": "part of its attention is recurrent",
    "qwen3_next": "part of its attention is recurrent, and it has experts",
    "mamba": "it has no attention",
}
_OTHER = "its blocks are not a Llama's"


def architecture(model_type: object, key: str = "model_type", where: str = "") -> BaseArchitecture:
    """Look up an architecture. Raises `UserError` with the reason if it cannot be a base."""
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    *names, last = ARCHITECTURES
    allowed = f"{', '.join(names)} or {last}"
    if model_type is None:
        raise UserError(key, Said("no value"), allowed, where)
    why = next((why for part, why in _REASONS.items() if part in str(model_type)), _OTHER)
    raise UserError(key, model_type, f"{allowed} ({why}: docs/bases.md)", where)
