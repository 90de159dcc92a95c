"""The OvR loss in one visit per tile: torch operations only, any device.

The loss is a plain sum over words with no normaliser, so a tile [N tokens x n words] gives its loss *and* its
gradients while it is at hand: two GEMMs make loc and scale, elementwise maths in fp32 turns them in place into the
two gradients, four GEMMs spread those. Nothing of size [N, V] exists and nothing is recomputed in backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

TILE_BYTES = 8 << 20  # of one [N, n] fp32 buffer
TINY = 1e-38


def chunk_rows(tokens: int, rows: int) -> int:
    """Words per tile, so that one fp32 [tokens, n] buffer takes about TILE_BYTES; at least 64."""
    return max(1, min(rows, max(64, TILE_BYTES // (4 * max(1, tokens)))))


class _OvrChunked(torch.autograd.Function):
    """forward: loss and, if any input needs it, all gradients; backward: those times the upstream scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        loc_u: Tensor,
        scale_u: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        threshold: Tensor,
        target: Tensor,
        token_weights: Tensor,
        class_weights: Tensor | None,
        rows: int,
        want_prob_sum: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        real = torch.promote_types(weight.dtype, torch.float32)
        need = ctx.needs_input_grad
        n = loc_u.shape[0]
        x, g = loc_u.to(real), scale_u.to(real)
        tw = token_weights.to(real)[:, None]
        d_x = torch.zeros_like(x) if need[0] else None
        d_g = torch.zeros_like(g) if need[1] else None
        d_w = torch.zeros_like(weight) if need[2] else None
        d_gap = torch.zeros(weight.shape[0], dtype=real, device=x.device) if need[3] or need[4] else None
        per_token = torch.zeros(n, dtype=real, device=x.device)
        prob_sum = torch.zeros_like(per_token) if want_prob_sum else None
        step = chunk_rows(n, rows)
        for v0 in range(0, rows, step):
            v1 = min(rows, v0 + step)
            w = weight[v0:v1].to(real)
            aw = w.abs()
            loc, s = x @ w.T, g @ aw.T
            if bias is not None:
                loc += bias[v0:v1].to(real)
            d = (threshold[v0:v1] if threshold.ndim else threshold).to(real) - loc
            both = (s == 0) & (d == 0)
            a_neg = torch.where(both, math.pi / 2, torch.atan2(s, -d))  # pi (1 - P)
            a_pos = torch.where(both, math.pi / 2, torch.atan2(s, d))  # pi P
            is_label = torch.arange(v0, v1, device=x.device) == target[:, None]
            p, q = a_pos / math.pi, a_neg / math.pi
            p, q = torch.where(is_label, q, p), torch.where(is_label, p, q)  # loss = -log q, p + q = 1
            bce = -torch.where(q > 0.5, torch.log1p(-p), torch.log(q))
            cw = None if class_weights is None else class_weights[v0:v1].to(real)
            per_token += (bce if cw is None else bce * cw).sum(1)
            if prob_sum is not None:
                prob_sum += (a_pos / math.pi).sum(1)
            if not any(need[:5]):
                continue
            f = tw / ((s * s + d * d + TINY) * torch.where(is_label, -a_pos, a_neg))
            if cw is not None:
                f = f * cw
            g_loc, g_s = f * s, f * d
            if d_gap is not None:
                d_gap[v0:v1] = g_loc.sum(0)
            if d_x is not None:
                d_x.addmm_(g_loc, w)
            if d_g is not None:
                d_g.addmm_(g_s, aw)
            if d_w is not None:
                d_w[v0:v1] = (g_loc.T @ x + (g_s.T @ g) * w.sign()).to(d_w.dtype)
        loss = torch.where(token_weights != 0, token_weights.to(real) * per_token, 0.0).sum()
        d_b = d_gap.to(bias.dtype) if bias is not None and need[3] and d_gap is not None else None
        d_t = None
        if need[4] and d_gap is not None:
            d_t = -(d_gap if threshold.ndim else d_gap.sum()).to(threshold.dtype)
        ctx.grads = (
            None if d_x is None else d_x.to(loc_u.dtype),
            None if d_g is None else d_g.to(scale_u.dtype),
            d_w,
            d_b,
            d_t,
        )
        ctx.mark_non_differentiable(*(t for t in (per_token, prob_sum) if t is not None))
        return loss, per_token, prob_sum

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        grads = tuple(None if d is None else d * upstream[0].to(d.dtype) for d in ctx.grads)
        return (*grads, None, None, None, None, None)


def ovr_chunked(
    loc_u: Tensor,
    scale_u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor,
    target: Tensor,
    token_weights: Tensor,
    class_weights: Tensor | None,
    rows: int,
    want_prob_sum: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Same contract as ``ovr_reference``; extra memory is a few tiles plus O(N C)."""
    out: tuple[Tensor, Tensor, Tensor | None] = _OvrChunked.apply(
        loc_u, scale_u, weight, bias, threshold, target, token_weights, class_weights, rows, want_prob_sum
    )
    return out
