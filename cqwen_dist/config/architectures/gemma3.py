"""Gemma 3 (text): norms before and after each block, a window in five of six layers, a scaled token table."""

from cqwen_dist.config.architectures.base_architecture import BaseArchitecture, attention, mlp, sizes

_ATTENTION = attention("attention_bias", "attention_bias", qk_norm=True, norms=2)

GEMMA3 = BaseArchitecture(
    model_type="gemma3_text",
    examples="Gemma 3 270M and 1B (text)",
    defaults=sizes(262_208, 2304, 9216, 26, 8, 4, head_dim=256),
    mixers={"sliding_attention": _ATTENTION, "full_attention": _ATTENTION},
    mlp=mlp(norms=2),
    interval=6,
    window=4096,
    tied=True,
)
