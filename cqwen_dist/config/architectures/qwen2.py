"""Qwen2 and Qwen2.5: Llama's block with biases for q, k and v. Qwen3 (dense): Llama's block with q and k norms, and an
independent head size."""

from cqwen_dist.config.architectures.base_architecture import IN_VLLM, BaseArchitecture, attention, mlp, sizes

QWEN2 = BaseArchitecture(
    model_type="qwen2",
    examples="Qwen2, Qwen2.5",
    defaults=sizes(151_936, 4096, 22_016, 32, 32, 32),
    mixers={"full_attention": attention(qkv=True)},
    mlp=mlp(),
    capabilities=IN_VLLM,
)


QWEN3 = BaseArchitecture(
    model_type="qwen3",
    examples="Qwen3 (dense)",
    defaults=sizes(151_936, 4096, 22_016, 32, 32, 32, head_dim=128),
    mixers={"full_attention": attention(qkv="attention_bias", o="attention_bias", qk_norm=True)},
    mlp=mlp(),
    capabilities=IN_VLLM,
)
