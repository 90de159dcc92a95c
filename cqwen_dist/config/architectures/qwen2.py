"""Qwen2 and Qwen2.5: Llama's block with biases for q, k and v. Qwen3 (dense): Llama's block with q and k norms, and an
independent head size."""

from cqwen_dist.config.architectures.base_architecture import IN_VLLM, BaseArchitecture, attention, mlp, sizes

QWEN2 = BaseArchitecture(
    model_type="qwen2",
    examples="Qwen2, Qwen2.5",
    defaults=sizes(151_936, 4096, 22_016, 32, 32, 32),
    mixers={"full_attention": attention(qkv=True)},
    mlp=mlp(),
    public={
        "Qwen/Qwen2.5-0.5B": sizes(151_936, 896, 4_864, 24, 14, 2, True, 32_768),
        "Qwen/Qwen2.5-1.5B": sizes(151_936, 1_536, 8_960, 28, 12, 2, True, 32_768),
        "Qwen/Qwen2.5-3B": sizes(151_936, 2_048, 11_008, 36, 16, 2, True, 32_768),
        "Qwen/Qwen2.5-7B": sizes(152_064, 3_584, 18_944, 28, 28, 4, False, 32_768),
        "Qwen/Qwen2.5-14B": sizes(152_064, 5_120, 13_824, 48, 40, 8, False, 32_768),
        "Qwen/Qwen2.5-32B": sizes(152_064, 5_120, 27_648, 64, 40, 8, False, 32_768),
        "Qwen/Qwen2.5-72B": sizes(152_064, 8_192, 29_568, 80, 64, 8, False, 32_768),
    },
    capabilities=IN_VLLM,
)


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
