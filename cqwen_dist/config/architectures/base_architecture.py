"""Data about a transformers architecture, for model, planner, adapters and export."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from cqwen_dist.config.errors import UserError

USUAL = "qwen2"  # for benchmarks, and if no base is named
# A layer's linear maps in the usual architecture. As adapter targets they mean the base's equivalents (`targets`).
USUAL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
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


@dataclass(frozen=True)
class Support:
    """Support for a feature on an architecture. note: the reason if it is not fully supported."""

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
    packing: Support = SUPPORTED  # several texts in a row
    compiled_layers: Support = SUPPORTED
    gradient_checkpointing: Support = SUPPORTED
    quantize: Support = NOT_MEASURED
    zero_3: Support = SUPPORTED  # needs the loader that partitions one module at a time
    sequence_groups: Support = NOT_MEASURED  # attention over the positions of several ranks (`parallel.mappings`)
    fused_adapters: Support = SUPPORTED  # if unsupported, PEFT's code runs
    merge: Support = SUPPORTED
    vllm: Support = Support("unsupported", "not tried in vLLM")  # `cqwen serve --engine vllm`


IN_VLLM = Capabilities(vllm=NOT_MEASURED)


@dataclass(frozen=True)
class BaseArchitecture:
    """A transformers `model_type` that can be a base."""

    model_type: str
    examples: str  # example models, for docs/bases.md
    defaults: Mapping[str, int]  # transformers' defaults for sizes missing from config.json
    mixers: Mapping[str, Block]  # blocks that mix positions, by layer type; the last one is every `interval`-th layer
    mlp: Block | None = None
    experts: Block | None = None  # replaces the MLP in the layers given by the config
    interval: int = 4
    biased: tuple[str, ...] = ()  # keys of biases that are true if config.json lacks them
    window: int | None = None  # default of sliding_window, 0 for none; None: never a window
    tied: bool = False  # default of tie_word_embeddings
    spare_rows: bool = True  # whether public models have unused vocabulary rows
    outside: tuple[str, str] | None = None  # (module, submodule parameter that it uses directly), for ZeRO-3
    nested: bool = False  # True if transformers can load only the text part of a multimodal model
    table: str = "model.embed_tokens.weight"  # names of the token table and output head in weight files
    head: str = "lm_head.weight"
    capabilities: Capabilities = Capabilities()

    @property
    def linears(self) -> dict[str, Linear]:
        """All linear maps that can have adapters, by name."""
        blocks = [*self.mixers.values(), *(part for part in (self.mlp, self.experts) if part is not None)]
        return {name: each for block in blocks if block.adapted for name, each in block.linears.items()}

    def targets(self, asked: Sequence[str] | str) -> list[str] | str:
        """`model.lora.target_modules` for this base. The usual list means this base's maps of attention, linear
        attention, MLP and shared experts."""
        if asked == "all-linear":
            return asked if self.experts is None else [*self.linears]
        if tuple(asked) == USUAL_TARGETS:
            return [name for name in self.linears if name != "shared_expert_gate"]
        return list(asked)

    def check_targets(self, asked: Sequence[str] | str) -> None:
        """Raises `UserError` for a map of `model.lora.target_modules` that this base lacks."""
        found, known = self.targets(asked), ", ".join(self.linears)
        for name in [] if isinstance(found, str) else found:
            if name not in self.linears:
                raise UserError("model.lora.target_modules", name, f"names out of {known}, or all-linear")

    def layers_of(self, found: Mapping[str, Any], count: int) -> list[tuple[Block, ...]]:
        """The blocks of each layer. found: the model's config."""
        first, last = next(iter(self.mixers)), [*self.mixers][-1]
        interval = found.get("full_attention_interval") or found.get("sliding_window_pattern") or self.interval
        types = found.get("layer_types") or [first if (i + 1) % interval else last for i in range(count)]
        dense, step = found.get("mlp_only_layers") or (), found.get("decoder_sparse_step") or 1
        layers: list[tuple[Block, ...]] = []
        for i in range(count):
            sparse = self.mlp is None or (self.experts is not None and i not in dense and (i + 1) % step == 0)
            wide = self.experts if sparse else self.mlp
            assert wide is not None
            layers.append((self.mixers.get(types[i % len(types)], self.mixers[last]), wide))
        return layers

    def require(self, capability: str, key: str, value: object) -> str:
        """Note on an experimental feature, else "". Raises `UserError` if `key: value` needs an unsupported one."""
        support: Support = getattr(self.capabilities, capability)
        if support.level == "unsupported":
            allowed = f"another value, or another base than {self.model_type} ({support.note}: docs/bases.md)"
            raise UserError(key, value, allowed)
        return f"{key}: {value} with {self.model_type} is experimental: {support.note}" if support.note else ""
