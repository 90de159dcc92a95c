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
    capabilities=IN_VLLM,
)


MISTRAL = BaseArchitecture(
    model_type="mistral",
    examples="Mistral 7B, Mistral NeMo, with a sliding window or without",
    defaults=sizes(32_000, 4096, 14_336, 32, 32, 8),
    mixers={"full_attention": attention()},
    mlp=mlp(),
    window=4096,
    spare_rows=False,
    capabilities=IN_VLLM,
)
