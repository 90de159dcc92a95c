"""Data about a transformers architecture, for model, planner, adapters and export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from cqwen_dist.config.errors import UserError

Bias = bool | str  # True, False, or the key in the model's config that decides


class Linear(NamedTuple):
    """A linear layer. Sizes: hidden H, intermediate I, queries A D, keys K D."""

    reads: str  # its input tensor; layers with the same input share the activation saved for backward
    rows: str  # input size
    columns: str  # output size
    bias: Bias = False


def llama_block(qkv: Bias = False, o: Bias = False, mlp: Bias = False) -> dict[str, Linear]:
    """Linear layers of a Llama block, in module order. Arguments decide the biases of each part."""
    return {
        "q_proj": Linear("attention norm", "hidden", "queries", qkv),
        "k_proj": Linear("attention norm", "hidden", "keys", qkv),
        "v_proj": Linear("attention norm", "hidden", "keys", qkv),
        "o_proj": Linear("attention", "queries", "hidden", o),
        "gate_proj": Linear("mlp norm", "hidden", "intermediate", mlp),
        "up_proj": Linear("mlp norm", "hidden", "intermediate", mlp),
        "down_proj": Linear("activation", "intermediate", "hidden", mlp),
    }


def public_sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool, context: int
) -> dict[str, Any]:
    """The sizes from a public model's config.json that the planner reads."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "max_position_embeddings": context,
    }


@dataclass(frozen=True)
class Support:
    """Whether a feature works on an architecture. note: why not, or what is still unproven."""

    level: Literal["supported", "experimental", "unsupported"] = "supported"
    note: str = ""


SUPPORTED = Support()
NOT_MEASURED = Support("experimental", "not yet measured on a GPU")


@dataclass(frozen=True)
class Capabilities:
    """Features that work on an architecture. Architectures list only differences from these defaults."""

    varlen: Support = Support(
        "experimental", "slower than the mask on an H200 at 1,024 tokens, longer rows not measured"
    )  # packed texts without a mask (`model.varlen`)
    compiled_layers: Support = SUPPORTED
    gradient_checkpointing: Support = SUPPORTED
    quantize: Support = NOT_MEASURED
    zero_3: Support = SUPPORTED  # needs the loader that partitions one module at a time
    sequence_groups: Support = NOT_MEASURED  # attention over the positions of several ranks (`parallel.sequence`)
    fused_adapters: Support = SUPPORTED  # if unsupported, PEFT's code runs
    merge: Support = SUPPORTED
    plain_export: Support = SUPPORTED


@dataclass(frozen=True)
class BaseArchitecture:
    """A transformers `model_type` that can be a base."""

    model_type: str
    examples: str  # example models, for docs/bases.md
    defaults: Mapping[str, int]  # transformers' defaults for sizes missing from config.json
    linears: Mapping[str, Linear]  # linear layers of a block; all can have adapters
    qk_norm: bool = False  # whether q and k are normalised per head
    window: int | None = None  # default of sliding_window; None: full attention
    spare_rows: bool = True  # whether public models have unused vocabulary rows
    public: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # `public_sizes` by hub name
    layers: str = "layers"  # attribute with the transformer's layers
    table: str = "model.embed_tokens.weight"  # names of the token table and output head in weight files
    head: str = "lm_head.weight"
    capabilities: Capabilities = Capabilities()

    def require(self, capability: str, key: str, value: object) -> str:
        """Note on an experimental feature, else "". Raises `UserError` if `key: value` needs an unsupported one."""
        support: Support = getattr(self.capabilities, capability)
        if support.level == "unsupported":
            allowed = f"another value, or another base than {self.model_type} ({support.note}: docs/bases.md)"
            raise UserError(key, value, allowed)
        return f"{key}: {value} with {self.model_type} is experimental: {support.note}" if support.note else ""
