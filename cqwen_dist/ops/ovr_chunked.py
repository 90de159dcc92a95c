"""The OvR loss in one visit per tile, on any device.

The loss is a plain sum over words with no normaliser, so a tile [t tokens x n words] gives its loss *and* its
gradients while it is at hand: two GEMMs make loc and scale, elementwise maths (``ovr_tile``) turns them into the two
gradients, four GEMMs spread those. Nothing of size [N, V] exists and nothing is recomputed in backward.

    x = loc_u, g = scale_u
    for each block of n words:
        for each block of t tokens:
            L = x W^T       S = g |W|^T
            L, S -> loss,   D_loc, D_scale          in place
            d_x += D_loc W                          d_g += D_scale |W|
            d_W += D_loc^T x + sign(W) * (D_scale^T g)

Token weights are an input (an upstream gradient per token cannot be known in one visit), so masks and global
denominators cost nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.ovr_inputs import OvrInputs, OvrSums
from cqwen_dist.ops.ovr_tile import Tile, TileMaths, TorchTile
from cqwen_dist.ops.products import mm_into

# Bytes of one [t, n] buffer, of one [n, C] buffer, and most tokens of a tile. CPU: what a tile touches stays in the
# outer cache. GPU: the GEMMs want large tiles more than the elementwise pass wants them in L2 (H200, N=8,192, H=896,
# bf16: 41 ms with tiles of 32 MiB, 30 with 128, 28.7 with 512, which would hold 1.8 GiB).
TILE_BYTES = {"cpu": 2 << 20, "cuda": 128 << 20}
BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
TILE_TOKENS = {"cpu": 512, "cuda": 8192}


def tile_shape(tokens: int, rows: int, c: int, device_type: str, itemsize: int = 4) -> tuple[int, int]:
    """(t, n): tokens and words of a tile, from the shape, the budgets of bytes and the device."""
    kind = "cpu" if device_type == "cpu" else "cuda"
    t = max(1, min(tokens, TILE_TOKENS[kind]))
    n = min(TILE_BYTES[kind] // (t * itemsize), BLOCK_BYTES[kind] // (max(1, c) * itemsize))
    return t, max(1, min(rows, n))


class Gradients(NamedTuple):
    """The gradient of each differentiable input, in its dtype; None where it is not needed."""

    loc_u: Tensor | None
    scale_u: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    threshold: Tensor | None


def visit(inputs: OvrInputs, need: tuple[bool, ...], maths: TileMaths) -> tuple[OvrSums, Gradients]:
    """The sums and, at upstream gradient 1, the gradients; ``need`` says for which of the five inputs.

    GEMMs run in loc_u's dtype on a GPU (fp32 accumulation), in fp32 on a CPU; fp64 throughout for fp64. A weight in
    fp32 is rounded block by block where they want bf16: no copy of it exists, and its gradient stays fp32.
    """
    weight, real = inputs.weight, inputs.real
    gemm = inputs.loc_u.dtype if weight.is_cuda else real
    (tokens, c), rows = inputs.loc_u.shape, inputs.rows
    x, g = inputs.loc_u.detach().to(gemm), inputs.scale_u.detach().to(gemm)
    token_weights = inputs.token_weights.to(real)
    offset = inputs.threshold.detach().to(real).expand(weight.shape[0])
    if inputs.bias is not None:
        offset = offset - inputs.bias.detach().to(real)
    class_weights = None if inputs.class_weights is None else inputs.class_weights.to(real)

    need_x, need_g, need_w, *need_gap = need
    d_x = x.new_zeros(x.shape, dtype=real) if need_x else None
    d_g = x.new_zeros(x.shape, dtype=real) if need_g else None
    d_w = torch.empty_like(weight) if need_w else None
    d_gap = x.new_zeros(weight.shape[0], dtype=real) if any(need_gap) else None
    per_token = torch.zeros(tokens, dtype=torch.float64, device=x.device)
    prob_sum = torch.zeros_like(per_token) if inputs.want_prob_sum else None

    t, n = tile_shape(tokens, rows, c, x.device.type, real.itemsize)
    tiles = _Flat(2 + maths.buffers, t * n, x, real)
    low = _Flat(2 if gemm != real and any(need) else 0, t * n, x, gemm)
    blocks = _Flat(2 if weight.dtype != gemm else 1, n * c, x, gemm)
    sums = _Flat(2 if need_w and weight.dtype != real else int(need_w), n * c, x, real)
    for v0 in range(0, rows, n):
        v1 = min(rows, v0 + n)
        words = slice(v0, v1)
        abs_w, *cast = blocks.view(v1 - v0, c)
        w = cast[0].copy_(weight[words]) if cast else weight.detach()[words]
        torch.abs(w, out=abs_w)
        d_w_loc, d_w_scale = None, None
        if d_w is not None:
            d_w_scale, *own = sums.view(v1 - v0, c)
            d_w_loc = own[0] if own else d_w[words]
        for i0 in range(0, tokens, t):
            some = slice(i0, min(tokens, i0 + t))
            shape = (x[some].shape[0], v1 - v0)
            loc, scale, *work = tiles.view(*shape)
            mm_into(x[some], w.T, loc)
            mm_into(g[some], abs_w.T, scale)
            tile = Tile(
                loc,
                scale,
                work,
                low.view(*shape),
                offset[words],
                inputs.target[some] - v0,
                token_weights[some],
                None if class_weights is None else class_weights[words],
                per_token[some],
                None if prob_sum is None else prob_sum[some],
            )
            d_loc, d_scale = maths(tile, any(need))
            if d_gap is not None:
                d_gap[words] += d_loc.sum(0, dtype=real)
            if d_x is not None:
                mm_into(d_loc, w, d_x[some], add=True)
            if d_g is not None:
                mm_into(d_scale, abs_w, d_g[some], add=True)
            if d_w_loc is not None and d_w_scale is not None:
                mm_into(d_loc.T, x[some], d_w_loc, add=i0 > 0)
                mm_into(d_scale.T, g[some], d_w_scale, add=i0 > 0)
        if d_w is not None and d_w_loc is not None and d_w_scale is not None and tokens:
            torch.sign(w, out=abs_w)
            d_w_loc.addcmul_(abs_w, d_w_scale)
            if d_w_loc.dtype != d_w.dtype:
                d_w[words].copy_(d_w_loc)
    if d_w is not None:
        d_w[rows if tokens else 0 :].zero_()

    weighted = torch.where(inputs.token_weights != 0, inputs.token_weights * per_token, 0.0)
    out = OvrSums(
        weighted.sum().to(real),
        per_token.to(real),
        None if prob_sum is None else prob_sum.to(real),
    )
    d_threshold = None
    if need[4] and d_gap is not None:
        d_threshold = -(d_gap if inputs.threshold.ndim else d_gap.sum()).to(inputs.threshold.dtype)
    return out, Gradients(
        None if d_x is None else d_x.to(inputs.loc_u.dtype),
        None if d_g is None else d_g.to(inputs.scale_u.dtype),
        d_w,
        d_gap.to(inputs.bias.dtype) if need[3] and inputs.bias is not None and d_gap is not None else None,
        d_threshold,
    )


def ovr_one_pass(inputs: OvrInputs, maths: TileMaths) -> OvrSums:
    """The loss with its gradients made in forward; under no_grad the loss alone. O(N C) and a few tiles of memory."""
    differentiable = inputs[:5]
    if not torch.is_grad_enabled() or not any(d is not None and d.requires_grad for d in differentiable):
        return visit(inputs, (False,) * 5, maths)[0]
    return OvrSums(*_OnePass.apply(*differentiable, inputs[5:], maths))


def ovr_chunked(inputs: OvrInputs) -> OvrSums:
    """``ovr_one_pass`` with the tile's maths in torch operations: any device."""
    return ovr_one_pass(inputs, TorchTile())


class _OnePass(torch.autograd.Function):
    """forward: loss and gradients. backward: those gradients times the upstream scalar, in place, handed over."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        *differentiable, ctx.constants, ctx.maths = args
        ctx.save_for_backward(*differentiable)
        sums, ctx.gradients = visit(OvrInputs(*differentiable, *ctx.constants), ctx.needs_input_grad[:5], ctx.maths)
        ctx.mark_non_differentiable(*(s for s in sums[1:] if s is not None))
        return sums.loss, sums.per_token, sums.prob_sum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        differentiable = ctx.saved_tensors  # raises if the graph is spent and was not retained
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # a retained graph, walked again: the first walk was given the tensors themselves
            inputs = OvrInputs(*differentiable, *ctx.constants)
            gradients = visit(inputs, ctx.needs_input_grad[:5], ctx.maths)[1]
        if upstream.is_cuda or float(upstream) != 1.0:  # on a CPU a look is free and the product is not
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(upstream)
        return *gradients, None, None


class _Flat:
    """Buffers allocated once; ``view`` cuts a contiguous [a, b] out of each."""

    def __init__(self, count: int, size: int, like: Tensor, dtype: torch.dtype) -> None:
        self._flat = [like.new_empty(size, dtype=dtype) for _ in range(count)]

    def view(self, a: int, b: int) -> list[Tensor]:
        return [flat[: a * b].view(a, b) for flat in self._flat]
