"""Architectures that can be a base: one file each, listed in `ARCHITECTURES` (floor 0: data, no torch)."""

from collections.abc import Mapping
from typing import Any

from cqwen_dist.config.architectures.base_architecture import BaseArchitecture
from cqwen_dist.config.architectures.gemma3 import GEMMA3
from cqwen_dist.config.architectures.llama import LLAMA, MISTRAL
from cqwen_dist.config.architectures.phi3 import PHI3
from cqwen_dist.config.architectures.qwen2 import QWEN2, QWEN3
from cqwen_dist.config.architectures.qwen3_5 import QWEN3_5
from cqwen_dist.config.architectures.qwen3_5_moe import QWEN3_5_MOE, QWEN3_NEXT
from cqwen_dist.config.architectures.qwen_moe import QWEN2_MOE, QWEN3_MOE
from cqwen_dist.config.errors import Said, UserError

_ALL = (QWEN2, QWEN3, QWEN3_5, QWEN3_NEXT, QWEN2_MOE, QWEN3_MOE, QWEN3_5_MOE, LLAMA, MISTRAL, PHI3, GEMMA3)
ARCHITECTURES = {each.model_type: each for each in _ALL}
# Linear maps that can have an adapter in at least one of them
LINEARS = tuple(dict.fromkeys(name for each in _ALL for name in each.linears))
# Why others cannot be a base. Substring of the `model_type` -> reason; the first match counts.
_NESTED = "its text model is part of a larger one"
_REASONS = {
    "moe": "its experts are stored in another way",
    "mixtral": "its experts are stored in another way",
    "gemma3": _NESTED,
    "gemma": "it scales embeddings inside its transformer, or caps its logits",
    "gpt": "it learns positions, and its linear maps have other names",
    "vl": _NESTED,
    "llama4": "it has experts, and its text model is part of a larger one",
    "mistral3": _NESTED,
    "mamba": "it has no attention",
}
_OTHER = "its blocks are not a Llama's"


def text_part(found: Mapping[str, Any], where: str = "") -> Mapping[str, Any]:
    """The config of the text model. A model that also reads images has it as a part, if the part can be a base.

    Raises `UserError` for weights that are rounded already: without their scales they are other numbers.
    """
    if (rounded := found.get("quantization_config")) is not None:
        raise UserError("quantization_config", rounded, "none: a full base (model.quantize rounds it)", where)
    inner = found.get("text_config")
    kind = ARCHITECTURES.get(str(inner.get("model_type"))) if isinstance(inner, Mapping) else None
    if found.get("model_type") in ARCHITECTURES or inner is None or kind is None or not kind.nested:
        return found
    tied = bool(inner.get("tie_word_embeddings") or found.get("tie_word_embeddings"))
    return {**inner, "tie_word_embeddings": tied}


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
