"""Activation memory: backbone tensors saved for backward, and temporary tensors in forward and backward.

All results are bytes for one micro-batch on one rank. docs/planner.md derives them; `plan.stage_sizes` defines the
letters.
"""

from collections.abc import Callable

from cqwen_dist.config.architectures.base_architecture import Block
from cqwen_dist.sizes.architecture import CHUNK
from cqwen_dist.tools.plan.stage_sizes import FP32, Sizes, ceil_div, masked

INT64, BOOL = 8, 1
Layer = tuple[Block, ...]


def layer_saved(s: Sizes, layer: Layer) -> int:
    """Bytes saved in one layer between forward and backward, with trainable or frozen adapters."""
    a, w = s.base, s.width
    each = 0.0
    for block in layer:
        # A norm saves its input in fp32 (compiled: in the input dtype), and 1 / rms
        each += block.norms * ((w if s.config.model.compile_layers else FP32) * a.hidden + FP32)
        each += SAVED[block.kind](s, block) + _adapters_saved(s, block)
    return round(s.tokens * each)


def _attention(s: Sizes, block: Block) -> float:
    a, w = s.base, s.width
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    read = max(a.kv_heads, s.sequence) * a.head_dim  # of k, and of v
    if masked(s):
        each = w * (4 * q)  # q and k with positions, v, output; k and v repeated for every head
        each += (a.heads * FP32) + s.sequence * s.length * w  # log-sum-exp; the mask as floats, one row per token
    elif s.kind == "cuda" and w == FP32 and q != read:
        # No fused kernel supports fp32 with fewer key heads, so the plain formula saves a score row per token and head.
        each = w * 4 * q + a.heads * s.length * w
    else:
        each = w * (2 * q + 2 * read) + a.heads * FP32
    gated = "gated attention" in a.reads(block)
    if block.qk_norm:
        each += FP32 * (q + kv) + FP32 * (a.heads + a.kv_heads)  # the norms of q and k
    if gated:  # the gate after its sigmoid; in fp32 the norm of q saves the gate along with q
        each += w * q + FP32 * q * (w == FP32) + w * q * (s.kind == "cpu")  # on a CPU the output is also copied
    # Whether attention runs text by text (`model.varlen`)
    by_text = s.config.data.pack and s.config.attention == "varlen" and (s.kind == "cpu" or s.width == FP32)
    if (by_text or s.sequence > 1) and "attention" in _adapted(s, block) and "lora" in s.trainable:
        each += w * q  # the concatenated or exchanged output, in addition to the output for each text
    return each


def _recurrence(s: Sizes, block: Block) -> float:
    """Gated linear attention, by transformers' own formula in fp32.

    Texts are taken in parts of `CHUNK` tokens. Of each part it keeps five [CHUNK, CHUNK] a head, twelve tensors like
    the keys (eight in bf16, whose copies in fp32 serve twice), seven like the values, nine numbers, and the state.
    """
    size, w = s.base.sizes, s.width
    heads, dk, dv = (size[f"linear_{name}"] for name in ("num_value_heads", "key_head_dim", "value_head_dim"))
    padded = ceil_div(s.length, CHUNK) * CHUNK / s.length
    keys, values = (12, 7) if w == FP32 else (8, 6.5)
    part = 5 * CHUNK + keys * dk + values * dv + 9 + dk * dv / CHUNK
    return 2 * w * size["linear qkv"] + FP32 * heads * part * padded  # first the convolution


def _experts(s: Sizes, block: Block) -> float:
    size, w = s.base.sizes, s.width
    k, i = size["num_experts_per_tok"], size["moe_intermediate_size"]
    each = k * (3 * w * i + w * s.base.hidden + 4 * INT64 + FP32) + FP32 * size["num_experts"]
    if block.linears:  # the shared expert, and its output before its gate
        each += 3 * w * size["shared_expert_intermediate_size"] + w * s.base.hidden + w
    return each


# Bytes per token that a block saves, by its kind
SAVED: dict[str, Callable[[Sizes, Block], float]] = {
    "attention": _attention,
    # gate, up, and act(gate), which compiled code recomputes
    "mlp": lambda s, block: s.width * (2 if s.config.model.compile_layers else 3) * s.base.sizes["intermediate"],
    "recurrence": _recurrence,
    "experts": _experts,
}


def _adapters_saved(s: Sizes, block: Block) -> int:
    """Bytes per token that the adapters of a block add: inputs and outputs of A while it trains, and dropout masks.

    The linear map under ZeRO-3 saves its input even if the weight is frozen, instead of the gathered weight.
    """
    lora, w = s.config.model.lora, s.width
    mask = (BOOL if s.kind == "cuda" else w) if lora.dropout else 0
    learns = "lora" in s.trainable or s.zero == 3
    widths = s.base.reads(block)
    total, inputs = 0, set(widths) if s.zero == 3 else set()
    for each in s.base.maps(block):
        if each.name not in s.adapters or not block.adapted:
            continue
        total += each.rows * mask
        if lora.dora:  # the product that the magnitude scales, and the base output
            total += w * 2 * each.columns
        if learns:
            total += w * lora.r
            if lora.dropout:
                total += w * each.rows  # each adapter has a separate dropout, so adapters cannot share the saved input
            else:
                inputs.add(each.reads)
    # The attention output is saved anyway.
    return total + w * sum(widths[tensor] for tensor in inputs - {"attention"})


def _adapted(s: Sizes, block: Block) -> set[str]:
    return {each.reads for each in s.base.maps(block) if block.adapted and each.name in s.adapters}


def saved(s: Sizes) -> int:
    """Bytes saved in the backbone at the end of forward: layers (or their inputs), last norm, positions, mask."""
    a, w, n = s.base, s.width, s.tokens
    layers = a.layers * n * w * a.hidden
    if not s.checkpointing:
        layers = sum(count * layer_saved(s, layer) for count, layer in a.stack)
    ends = n * (FP32 * a.hidden + FP32) + n * 2 * w * a.head_dim
    mask = n * s.length * BOOL if masked(s) else 0
    return layers + ends + mask + batch(s)


def batch(s: Sizes) -> int:
    """Bytes of the micro-batch: ids, positions, labels, label positions, values, masks."""
    return s.tokens * (4 * INT64 + 2 * 8 + 2 * BOOL)


def layer_backward(s: Sizes) -> int:
    """Peak temporary bytes in backward through the last layer: the gradients of its widest tensors."""
    a, w, n = s.base, s.width, s.tokens

    def peak(layer: Layer) -> int:
        adapted = set[str]().union(*(_adapted(s, block) for block in layer))
        wide = 2 if "activation" in adapted and "lora" in s.trainable else 3
        return (layer_saved(s, layer) if s.checkpointing else 0) + n * wide * w * widest(s, layer)

    return max(peak(layer) for _, layer in a.stack) + n * (w + FP32) * a.hidden


def widest(s: Sizes, layer: Layer) -> int:
    """Numbers of a token in the widest tensors of a layer: in the MLP, or of the experts that it uses together."""
    size = s.base.sizes
    if any(block.kind == "experts" for block in layer):
        shared = size.get("shared_expert_intermediate_size", 0)
        return max(size["num_experts_per_tok"] * size["moe_intermediate_size"], shared)
    return size["intermediate"]


def layer_forward(s: Sizes) -> int:
    """Peak temporary bytes in one layer if nothing is saved for backward."""
    a, w, n = s.base, s.width, s.tokens
    wide = max(widest(s, layer) for _, layer in a.stack)
    return n * w * (3 * a.hidden + 3 * wide) + n * 2 * w * a.head_dim + batch(s)
