"""Llama and SmolLM, where linear layers may have biases and num_key_value_heads is the number of attention heads if it
is missing. Mistral 7B and NeMo: the same block without biases; attention may use a sliding window."""

from cqwen_dist.config.architectures.base_architecture import IN_VLLM, BaseArchitecture, attention, mlp, sizes

LLAMA = BaseArchitecture(
    model_type="llama",
    examples="Llama 2, 3, 3.1 and 3.2 (text), SmolLM, SmolLM2, TinyLlama",
    defaults=sizes(32_000, 4096, 11_008, 32, 32),
    mixers={"full_attention": attention(qkv="attention_bias", o="attention_bias")},
    mlp=mlp("mlp_bias"),
    spare_rows=False,
    public={
        "HuggingFaceTB/SmolLM2-135M": sizes(49_152, 576, 1_536, 30, 9, 3, True, 8_192),
        "HuggingFaceTB/SmolLM2-360M": sizes(49_152, 960, 2_560, 32, 15, 5, True, 8_192),
        "HuggingFaceTB/SmolLM2-1.7B": sizes(49_152, 2_048, 8_192, 24, 32, 32, True, 8_192),
        "meta-llama/Llama-3.2-1B": sizes(128_256, 2_048, 8_192, 16, 32, 8, True, 131_072),
        "meta-llama/Llama-3.2-3B": sizes(128_256, 3_072, 8_192, 28, 24, 8, True, 131_072),
        "meta-llama/Llama-3.1-8B": sizes(128_256, 4_096, 14_336, 32, 32, 8, False, 131_072),
        "meta-llama/Llama-3.1-70B": sizes(128_256, 8_192, 28_672, 80, 64, 8, False, 131_072),
    },
    capabilities=IN_VLLM,
)


_WHOLE = {"sliding_window": None}  # later releases have full attention

MISTRAL = BaseArchitecture(
    model_type="mistral",
    examples="Mistral 7B, Mistral NeMo, with a sliding window or without",
    defaults=sizes(32_000, 4096, 14_336, 32, 32, 8),
    mixers={"full_attention": attention()},
    mlp=mlp(),
    window=4096,
    spare_rows=False,
    public={"mistralai/Mistral-7B-v0.3": sizes(32_768, 4_096, 14_336, 32, 32, 8, False, 32_768) | _WHOLE},
    capabilities=IN_VLLM,
)
