"""Qwen3 (dense): Llama's block with q and k norms, and an independent head size."""

from cqwen_dist.config.architectures.base_architecture import IN_VLLM, BaseArchitecture, attention, mlp, sizes

QWEN3 = BaseArchitecture(
    model_type="qwen3",
    examples="Qwen3 (dense)",
    defaults=sizes(151_936, 4096, 22_016, 32, 32, 32, head_dim=128),
    mixers={"full_attention": attention(qkv="attention_bias", o="attention_bias", qk_norm=True)},
    mlp=mlp(),
    public={
        "Qwen/Qwen3-0.6B-Base": sizes(151_936, 1_024, 3_072, 28, 16, 8, True, 32_768),
        "Qwen/Qwen3-1.7B-Base": sizes(151_936, 2_048, 6_144, 28, 16, 8, True, 32_768),
        "Qwen/Qwen3-4B-Base": sizes(151_936, 2_560, 9_728, 36, 32, 8, True, 32_768),
        "Qwen/Qwen3-8B-Base": sizes(151_936, 4_096, 12_288, 36, 32, 8, False, 32_768),
        "Qwen/Qwen3-14B-Base": sizes(151_936, 5_120, 17_408, 40, 40, 8, False, 32_768),
    },
    capabilities=IN_VLLM,
)
