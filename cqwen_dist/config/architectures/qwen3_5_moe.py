"""Mixtures of experts with gated linear attention: Qwen3.5's and Qwen3-Next, which joins its input maps."""

from dataclasses import replace

from cqwen_dist.config.architectures.base_architecture import Capabilities, experts, gated_delta, mlp, sizes
from cqwen_dist.config.architectures.qwen3_5 import GATED, QWEN3_5, RECURRENT, SIZES
from cqwen_dist.config.architectures.qwen_moe import WITH_EXPERTS

_SPARSE = {"hidden_size": 2048, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_SPARSE |= {"num_key_value_heads": 2}

QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    examples="Qwen3.5-35B-A3B and larger mixtures, also inside of the models with images (`qwen3_5_moe`)",
    defaults=SIZES | _SPARSE | {"num_hidden_layers": 40, "num_experts_per_tok": 8, "num_experts": 256},
    mlp=None,
    experts=experts(shared=True),
    capabilities=Capabilities(**WITH_EXPERTS | RECURRENT),
)

QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    model_type="qwen3_next",
    examples="Qwen3-Next-80B-A3B",
    nested=False,
    defaults=SIZES | _SPARSE | sizes(151_936, 2048, 5632, 48, num_experts_per_tok=10, num_experts=512),
    mixers={
        "linear_attention": gated_delta({"in_proj_qkvz": "linear qkvz", "in_proj_ba": "linear ba"}),
        "full_attention": GATED,
    },
    mlp=mlp(adapted=False),  # by these names PEFT means the experts, and no shared one
    experts=experts(shared=True, adapted=False),
)
