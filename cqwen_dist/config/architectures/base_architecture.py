"""What one architecture of transformers is to this package: plain data for model, planner, adapters and export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from cqwen_dist.config.errors import UserError

Bias = bool | str  # always, never, or the key of the model's config that says so


class Linear(NamedTuple):
    """A linear map of a layer. Sizes: hidden H, intermediate I, queries A D, keys K D."""

    reads: str  # the tensor that it reads; maps that read the same one share what backward keeps of it
    rows: str  # the size of its input
    columns: str  # the size of its output
    bias: Bias = False


def llama_block(qkv: Bias = False, o: Bias = False, mlp: Bias = False) -> dict[str, Linear]:
    """The maps of a layer as Llama has them, in the order of its modules; what decides the biases of each part."""
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
    """The part of a public model's config.json that the planner reads."""
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
    """Whether something works on an architecture. note: why it does not, or what has not been shown yet."""

    level: Literal["supported", "experimental", "unsupported"] = "supported"
    note: str = ""


SUPPORTED = Support()
NOT_MEASURED = Support("experimental", "not yet measured on a GPU")


@dataclass(frozen=True)
class Capabilities:
    """What works on an architecture, which names only what differs from these defaults."""

    varlen: Support = Support(
        "experimental", "slower than the mask on an H200 at 1,024 tokens, longer rows not measured"
    )  # packed texts without a mask (`model.varlen`)
    compiled_layers: Support = SUPPORTED
    gradient_checkpointing: Support = SUPPORTED
    quantize: Support = NOT_MEASURED
    zero_3: Support = SUPPORTED  # the loader that partitions one module at a time
    fused_adapters: Support = SUPPORTED  # unsupported: PEFT's own formula runs
    merge: Support = SUPPORTED
    plain_export: Support = SUPPORTED


@dataclass(frozen=True)
class BaseArchitecture:
    """One `model_type` of transformers that can be a base."""

    model_type: str
    examples: str  # models that have it, for docs/bases.md
    defaults: Mapping[str, int]  # what transformers takes for a size that config.json leaves out
    linears: Mapping[str, Linear]  # of a layer; all of them can have adapters
    qk_norm: bool = False  # whether q and k are normalised for each head
    window: int | None = None  # the default of sliding_window; None: attention always sees the whole text
    spare_rows: bool = True  # whether public models have rows of the vocabulary that no word uses
    public: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # `public_sizes` by hub name
    layers: str = "layers"  # the list of layers in the transformer
    table: str = "model.embed_tokens.weight"  # the token table, and the output head, in the weights' files
    head: str = "lm_head.weight"
    capabilities: Capabilities = Capabilities()

    def require(self, capability: str, key: str, value: object) -> str:
        """Raises `UserError` where `key: value` asks for what is unsupported here; returns a note on what is
        experimental, else "".
        """
        support: Support = getattr(self.capabilities, capability)
        if support.level == "unsupported":
            allowed = f"another value, or another base than {self.model_type} ({support.note}: docs/bases.md)"
            raise UserError(key, value, allowed)
        return f"{key}: {value} with {self.model_type} is experimental: {support.note}" if support.note else ""
