"""The parts of a transformer layer as data: linear maps and other parameters, with the sizes that the planner needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Bias = bool | str  # True, False, or the key in the model's config that decides


class Linear(NamedTuple):
    """A linear layer. Sizes are names of `sizes.architecture`."""

    reads: str  # its input tensor; layers with the same input share the activation saved for backward
    rows: str  # input size
    columns: str  # output size
    bias: Bias = False


@dataclass(frozen=True)
class Block:
    """A part of a layer between two additions to the residual stream, with the norm before it."""

    kind: Literal["attention", "recurrence", "mlp", "experts"]
    linears: Mapping[str, Linear]  # in module order
    more: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # other parameters: their sizes by name
    norms: int = 1  # of H numbers
    adapted: bool = True  # whether its linear maps can have adapters

    @property
    def qk_norm(self) -> bool:
        """Whether q and k are normalised per head."""
        return "q_norm" in self.more


def attention(qkv: Bias = False, o: Bias = False, qk_norm: bool = False, gate: bool = False, norms: int = 1) -> Block:
    """Attention as in Llama. qkv, o: decide the biases. gate: q_proj also makes a gate for the output."""
    reads = "gated attention" if gate else "attention"
    linears = {
        "q_proj": Linear("attention norm", "hidden", "gated queries" if gate else "queries", qkv),
        "k_proj": Linear("attention norm", "hidden", "keys", qkv),
        "v_proj": Linear("attention norm", "hidden", "keys", qkv),
        "o_proj": Linear(reads, "queries", "hidden", o),
    }
    more = {"q_norm": ("head_dim",), "k_norm": ("head_dim",)} if qk_norm else {}
    return Block("attention", linears, more, norms)


def mlp(bias: Bias = False, norms: int = 1, adapted: bool = True) -> Block:
    """The gated MLP of Llama."""
    return Block("mlp", gated_maps("intermediate", bias), norms=norms, adapted=adapted)


def gated_maps(size: str, bias: Bias = False) -> dict[str, Linear]:
    """Linear maps of a gated MLP."""
    return {
        "gate_proj": Linear("mlp norm", "hidden", size, bias),
        "up_proj": Linear("mlp norm", "hidden", size, bias),
        "down_proj": Linear("activation", size, "hidden", bias),
    }


def gated_delta(inputs: Mapping[str, str]) -> Block:
    """Gated linear attention with a recurrent state [dk, dv] a head. inputs: output size of each input map."""
    maps = {name: Linear("attention norm", "hidden", size) for name, size in inputs.items()}
    # The module's order: first its direct parameters, then those of its submodules
    more = {
        "dt_bias": ("linear_num_value_heads",),
        "A_log": ("linear_num_value_heads",),
        "conv1d": ("linear qkv", "linear_conv_kernel_dim"),
        "norm": ("linear_value_head_dim",),
    }
    return Block("recurrence", {"out_proj": Linear("normed state", "linear values", "hidden"), **maps}, more)


def experts(shared: bool = False, adapted: bool = True) -> Block:
    """A router and its experts, all in two parameters; shared: with an expert that every token uses."""
    maps = {}
    if shared:
        maps = gated_maps("shared_expert_intermediate_size")
        maps["down_proj"] = maps["down_proj"]._replace(reads="shared activation")
        maps["shared_expert_gate"] = Linear("mlp norm", "hidden", "one")
    more = {
        "gate": ("num_experts", "hidden"),
        "experts.gate_up_proj": ("num_experts", "two", "moe_intermediate_size", "hidden"),
        "experts.down_proj": ("num_experts", "hidden", "moe_intermediate_size"),
    }
    return Block("experts", maps, more, adapted=adapted)


def sizes(*values: int, **more: int) -> dict[str, Any]:
    """Sizes by their keys in a config.json; of the first ones, in this order, the last may be left out."""
    keys = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    keys += " tie_word_embeddings max_position_embeddings"
    return dict(zip(keys.split()[: len(values)], values, strict=True)) | more
