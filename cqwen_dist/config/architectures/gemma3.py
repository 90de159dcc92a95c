"""Gemma 3 (text): norms before and after each block, a window in five of six layers, a scaled token table."""

from cqwen_dist.config.architectures.base_architecture import BaseArchitecture, public_sizes
from cqwen_dist.config.architectures.layer_blocks import attention, mlp

_ATTENTION = attention("attention_bias", "attention_bias", qk_norm=True, norms=2)

GEMMA3 = BaseArchitecture(
    model_type="gemma3_text",
    examples="Gemma 3 270M and 1B (text)",
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    mixers={"sliding_attention": _ATTENTION, "full_attention": _ATTENTION},
    mlp=mlp(norms=2),
    interval=6,
    window=4096,
    tied=True,
    public={
        "google/gemma-3-270m": public_sizes(262_144, 640, 2_048, 18, 4, 1, True, 32_768) | {"sliding_window": 512},
        "google/gemma-3-1b-pt": public_sizes(262_144, 1_152, 6_912, 26, 4, 1, True, 32_768) | {"sliding_window": 512},
    },
)
