"""Sizes of public base models by hub name, as their config.json has them: planning and measuring need no download."""

from __future__ import annotations

from typing import Any

_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "tie_word_embeddings", "max_position_embeddings"),
)
# hub name: `_KEYS`
_SIZES: dict[str, tuple[str, int, int, int, int, int, int, bool, int]] = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 151_936, 896, 4_864, 24, 14, 2, True, 32_768),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 151_936, 1_536, 8_960, 28, 12, 2, True, 32_768),
    "Qwen/Qwen2.5-3B": ("qwen2", 151_936, 2_048, 11_008, 36, 16, 2, True, 32_768),
    "Qwen/Qwen2.5-7B": ("qwen2", 152_064, 3_584, 18_944, 28, 28, 4, False, 32_768),
    "Qwen/Qwen2.5-14B": ("qwen2", 152_064, 5_120, 13_824, 48, 40, 8, False, 32_768),
    "Qwen/Qwen2.5-32B": ("qwen2", 152_064, 5_120, 27_648, 64, 40, 8, False, 32_768),
    "Qwen/Qwen2.5-72B": ("qwen2", 152_064, 8_192, 29_568, 80, 64, 8, False, 32_768),
    "Qwen/Qwen3-0.6B-Base": ("qwen3", 151_936, 1_024, 3_072, 28, 16, 8, True, 32_768),
    "Qwen/Qwen3-1.7B-Base": ("qwen3", 151_936, 2_048, 6_144, 28, 16, 8, True, 32_768),
    "Qwen/Qwen3-4B-Base": ("qwen3", 151_936, 2_560, 9_728, 36, 32, 8, True, 32_768),
    "Qwen/Qwen3-8B-Base": ("qwen3", 151_936, 4_096, 12_288, 36, 32, 8, False, 32_768),
    "Qwen/Qwen3-14B-Base": ("qwen3", 151_936, 5_120, 17_408, 40, 40, 8, False, 32_768),
    "HuggingFaceTB/SmolLM2-135M": ("llama", 49_152, 576, 1_536, 30, 9, 3, True, 8_192),
    "HuggingFaceTB/SmolLM2-360M": ("llama", 49_152, 960, 2_560, 32, 15, 5, True, 8_192),
    "HuggingFaceTB/SmolLM2-1.7B": ("llama", 49_152, 2_048, 8_192, 24, 32, 32, True, 8_192),
    "meta-llama/Llama-3.2-1B": ("llama", 128_256, 2_048, 8_192, 16, 32, 8, True, 131_072),
    "meta-llama/Llama-3.2-3B": ("llama", 128_256, 3_072, 8_192, 28, 24, 8, True, 131_072),
    "meta-llama/Llama-3.1-8B": ("llama", 128_256, 4_096, 14_336, 32, 32, 8, False, 131_072),
    "meta-llama/Llama-3.1-70B": ("llama", 128_256, 8_192, 28_672, 80, 64, 8, False, 131_072),
    "mistralai/Mistral-7B-v0.3": ("mistral", 32_768, 4_096, 14_336, 32, 32, 8, False, 32_768),
}


def known_architecture(name: str) -> dict[str, Any] | None:
    """The transformers config of a public base model (its -Instruct sibling's is the same), or None."""
    found = _SIZES.get(name) or _SIZES.get(name.removesuffix("-Instruct"))
    if found is None:
        return None
    window = {"sliding_window": None} if found[0] == "mistral" else {}
    return {**dict(zip(_KEYS, found, strict=True)), **window}
