"""Phi-3, Phi-3.5 and Phi-4 (text): Llama's block with q, k and v in one map, and gate and up in one."""

from cqwen_dist.config.architectures.base_architecture import BaseArchitecture, Block, Linear, sizes

_ATTENTION = {
    "o_proj": Linear("attention", "queries", "hidden"),
    "qkv_proj": Linear("attention norm", "hidden", "queries, keys, values"),
}
_MLP = {
    "gate_up_proj": Linear("mlp norm", "hidden", "gate and up"),
    "down_proj": Linear("activation", "intermediate", "hidden"),
}

PHI3 = BaseArchitecture(
    model_type="phi3",
    examples="Phi-3, Phi-3.5 and Phi-4 (text)",
    defaults=sizes(32_064, 3072, 8192, 32, 32),
    mixers={"full_attention": Block("attention", _ATTENTION)},
    mlp=Block("mlp", _MLP),
    window=0,  # Phi-3 mini's config has one of 2,047
)
