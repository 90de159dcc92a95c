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
    public={"Qwen/Qwen1.5-MoE-A2.7B": sizes(151_936, 2_048, 5_632, 24, 16, 16, False, 8_192)},
    capabilities=Capabilities(**WITH_EXPERTS),
)

QWEN3_MOE = BaseArchitecture(
    model_type="qwen3_moe",
    examples="Qwen3-30B-A3B, Qwen3-235B-A22B",
    defaults=sizes(151_936, 2048, 6144, 24, 32, 4, moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128),
    mixers={"full_attention": attention("attention_bias", "attention_bias", qk_norm=True)},
    mlp=mlp(adapted=False),  # by these names PEFT means the experts
    experts=experts(),
    public={
        "Qwen/Qwen3-30B-A3B": sizes(151_936, 2_048, 6_144, 48, 32, 4, False, 40_960, head_dim=128),
        "Qwen/Qwen3-235B-A22B": sizes(
            151_936, 4_096, 12_288, 94, 64, 4, False, 40_960, head_dim=128, moe_intermediate_size=1_536
        ),
    },
    capabilities=Capabilities(**WITH_EXPERTS),
)
