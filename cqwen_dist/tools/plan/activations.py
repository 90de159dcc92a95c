"""Activation memory: backbone tensors saved for backward, and temporary tensors in forward and backward.

All results are bytes for one micro-batch on one rank. docs/planner.md derives them; `plan.stage_sizes` defines the
letters.
"""

from __future__ import annotations

from cqwen_dist.tools.plan.stage_sizes import FP32, Sizes, masked

INT64, BOOL = 8, 1


def by_text(s: Sizes) -> bool:
    """Whether attention runs text by text (`model.varlen`)."""
    return s.config.data.pack and s.config.model.attention == "varlen" and (s.kind == "cpu" or s.width == FP32)


def layer_saved(s: Sizes) -> int:
    """Bytes saved in one layer between forward and backward, with trainable or frozen adapters."""
    a, w = s.base, s.width
    h, i, q, kv = a.hidden, a.intermediate, a.heads * a.head_dim, a.kv_heads * a.head_dim
    compiled = s.config.model.compile_layers
    # Both norms save their input in fp32 (compiled: in the input dtype), and 1 / rms.
    each = 2 * ((w if compiled else FP32) * h + FP32)
    if masked(s):
        each += w * (4 * q)  # q and k with positions, v, output; k and v repeated for every head
        each += (a.heads * FP32) + s.length * w  # log-sum-exp; the mask as floats, one row per token
    elif s.kind == "cuda" and w == FP32 and q != kv:
        # No fused kernel supports fp32 with fewer key heads, so the plain formula saves a score row per token and head.
        each += w * 4 * q + a.heads * s.length * w
    else:
        each += w * (2 * q + 2 * kv) + a.heads * FP32
    if a.kind.qk_norm:
        each += FP32 * (q + kv) + FP32 * (a.heads + a.kv_heads)  # the norms of q and k
    if by_text(s) and "attention" in _adapted(s) and "lora" in s.trainable:
        each += w * q  # the concatenated output, in addition to the output for each text
    each += w * (2 if compiled else 3) * i  # gate, up, and act(gate), which compiled code recomputes
    return s.tokens * (each + _adapters_saved(s))


def _adapters_saved(s: Sizes) -> int:
    """Bytes per token that the adapters in a layer add: inputs and outputs of A while it trains, and dropout masks.

    The linear map under ZeRO-3 saves its input even if the weight is frozen, instead of the gathered weight.
    """
    lora, w = s.config.model.lora, s.width
    mask = (BOOL if s.kind == "cuda" else w) if lora.dropout else 0
    learns = "lora" in s.trainable or s.zero == 3
    total, inputs = 0, set(s.base.read_widths) if s.zero == 3 else set()
    for name in s.adapters:
        rows, columns, _ = s.base.linears[name]
        total += rows * mask
        if lora.dora:  # the product that the magnitude scales, and the base output
            total += w * 2 * columns
        if learns:
            total += w * lora.r
            if lora.dropout:
                total += w * rows  # each adapter has a separate dropout, so adapters cannot share the saved input
            else:
                inputs.add(s.base.kind.linears[name].reads)
    # The attention output is saved anyway.
    return total + w * sum(s.base.read_widths[tensor] for tensor in inputs - {"attention"})


def _adapted(s: Sizes) -> set[str]:
    """The layer tensors that adapted linear maps read."""
    return {s.base.kind.linears[name].reads for name in s.adapters}


def saved(s: Sizes) -> int:
    """Bytes saved in the backbone at the end of forward: layers (or their inputs), last norm, positions, mask."""
    a, w, n = s.base, s.width, s.tokens
    layers = a.layers * (n * w * a.hidden if s.checkpointing else layer_saved(s))
    ends = n * (FP32 * a.hidden + FP32) + n * 2 * w * a.head_dim
    mask = n * s.length * BOOL if masked(s) else 0
    return layers + ends + mask + batch(s)


def batch(s: Sizes) -> int:
    """Bytes of the micro-batch: ids, positions, labels, label positions, values, masks."""
    return s.tokens * (4 * INT64 + 2 * 8 + 2 * BOOL)


def layer_backward(s: Sizes) -> int:
    """Peak temporary bytes in backward through the last layer: the gradients of its widest tensors."""
    a, w, n = s.base, s.width, s.tokens
    wide = 2 if "activation" in _adapted(s) and "lora" in s.trainable else 3
    recomputed = layer_saved(s) if s.checkpointing else 0
    return recomputed + n * (wide * w * a.intermediate + (w + FP32) * a.hidden)


def layer_forward(s: Sizes) -> int:
    """Peak temporary bytes in one layer if nothing is saved for backward."""
    a, w, n = s.base, s.width, s.tokens
    return n * w * (3 * a.hidden + 3 * a.intermediate) + n * 2 * w * a.head_dim + batch(s)
