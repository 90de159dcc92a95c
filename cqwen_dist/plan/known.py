"""Sizes of the public Qwen2.5 and Qwen3 base models by hub name, as their config.json has them: planning and measuring
need no download."""

from __future__ import annotations

from typing import Any

QWEN25, QWEN3 = "qwen2", "qwen3"
# hub name: kind, V, H, I, L, A, K, tied
_SIZES: dict[str, tuple[str, int, int, int, int, int, int, bool]] = {
    "Qwen/Qwen2.5-0.5B": (QWEN25, 151_936, 896, 4_864, 24, 14, 2, True),
    "Qwen/Qwen2.5-1.5B": (QWEN25, 151_936, 1_536, 8_960, 28, 12, 2, True),
    "Qwen/Qwen2.5-3B": (QWEN25, 151_936, 2_048, 11_008, 36, 16, 2, True),
    "Qwen/Qwen2.5-7B": (QWEN25, 152_064, 3_584, 18_944, 28, 28, 4, False),
    "Qwen/Qwen2.5-14B": (QWEN25, 152_064, 5_120, 13_824, 48, 40, 8, False),
    "Qwen/Qwen2.5-32B": (QWEN25, 152_064, 5_120, 27_648, 64, 40, 8, False),
    "Qwen/Qwen2.5-72B": (QWEN25, 152_064, 8_192, 29_568, 80, 64, 8, False),
    "Qwen/Qwen3-0.6B-Base": (QWEN3, 151_936, 1_024, 3_072, 28, 16, 8, True),
    "Qwen/Qwen3-1.7B-Base": (QWEN3, 151_936, 2_048, 6_144, 28, 16, 8, True),
    "Qwen/Qwen3-4B-Base": (QWEN3, 151_936, 2_560, 9_728, 36, 32, 8, True),
    "Qwen/Qwen3-8B-Base": (QWEN3, 151_936, 4_096, 12_288, 36, 32, 8, False),
    "Qwen/Qwen3-14B-Base": (QWEN3, 151_936, 5_120, 17_408, 40, 40, 8, False),
}


def known_architecture(name: str) -> dict[str, Any] | None:
    """The transformers config of a public base model (its -Instruct sibling's is the same), or None."""
    found = _SIZES.get(name) or _SIZES.get(name.removesuffix("-Instruct"))
    if found is None:
        return None
    kind, vocab, hidden, intermediate, layers, heads, kv_heads, tied = found
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": tied,
    }
