"""Mistral 7B and NeMo: Llama's block without biases; attention may use a sliding window."""

from cqwen_dist.config.architectures.base_architecture import IN_VLLM, BaseArchitecture, attention, mlp, sizes

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
