"""Qwen2's and Qwen3's mixtures of experts: the attention of Qwen2 and Qwen3, and experts in place of the MLP."""

from cqwen_dist.config.architectures.base_architecture import (
    BaseArchitecture,
    Capabilities,
    Support,
    attention,
    experts,
    mlp,
    sizes,
)

WITH_EXPERTS = {
    "compiled_layers": Support("experimental", "not yet tried with experts"),
    "quantize": Support("unsupported", "all experts are one parameter, which bitsandbytes leaves in 16 bits"),
}

QWEN2_MOE = BaseArchitecture(
    model_type="qwen2_moe",
    examples="Qwen1.5-MoE, Qwen2-57B-A14B",
    defaults=sizes(151_936, 2048, 5632, 24, 16, 16)
    | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    | {"num_experts_per_tok": 4, "num_experts": 60},
    mixers={"full_attention": attention(qkv="qkv_bias")},
    mlp=mlp(),
    experts=experts(shared=True),
    biased=("qkv_bias",),
    capabilities=Capabilities(**WITH_EXPERTS),
)

QWEN3_MOE = BaseArchitecture(
    model_type="qwen3_moe",
    examples="Qwen3-30B-A3B, Qwen3-235B-A22B",
    defaults=sizes(151_936, 2048, 6144, 24, 32, 4, moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128),
    mixers={"full_attention": attention("attention_bias", "attention_bias", qk_norm=True)},
    mlp=mlp(adapted=False),  # by these names PEFT means the experts
    experts=experts(),
    capabilities=Capabilities(**WITH_EXPERTS),
)
