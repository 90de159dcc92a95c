"""Qwen3.5 to 3.8 (dense): gated linear attention in three of four layers, gated attention in the fourth."""

from cqwen_dist.config.architectures.base_architecture import (
    BaseArchitecture,
    Capabilities,
    Support,
    attention,
    gated_delta,
    mlp,
)

_STATE = Support("unsupported", "its recurrent layers carry their state from a packed text into the next")
RECURRENT = {
    "packing": _STATE,
    "varlen": _STATE,
    "sequence_groups": Support("unsupported", "its recurrent layers read a text in order, on one rank"),
    "compiled_layers": Support("unsupported", "its recurrent layers loop over parts of a text in Python"),
}
_HEADS = "linear_num_value_heads"
_INPUTS = {"in_proj_qkv": "linear qkv", "in_proj_z": "linear values", "in_proj_b": _HEADS, "in_proj_a": _HEADS}
GATED = attention("attention_bias", "attention_bias", qk_norm=True, gate=True)
SIZES = {"vocab_size": 248_320, "num_attention_heads": 16, "head_dim": 256}
SIZES |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
SIZES |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
_DENSE = {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32, "num_key_value_heads": 4}

QWEN3_5 = BaseArchitecture(
    model_type="qwen3_5_text",
    examples="Qwen3.5, 3.6 and 3.8 (dense), also inside of the models with images (`qwen3_5`)",
    defaults=SIZES | _DENSE,
    mixers={"linear_attention": gated_delta(_INPUTS), "full_attention": GATED},
    mlp=mlp(),
    outside=("linear_attn", "conv1d.weight"),
    nested=True,
    capabilities=Capabilities(**RECURRENT),
)
