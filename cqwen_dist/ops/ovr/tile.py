"""One tile [t tokens x n words] of the OvR loss: from (loc_S, scale_S) to the loss of each token and the gradients.

Every entry is -log of an angle. For a word that is not the label it is -log(1 - P), P = atan2(s, d)/pi, with
d = C - loc_S and s = scale_S. For the label it is -log P: the same function at -d. So d is negated at the labels first,
dloss/dloc last, and the maths between treats all entries alike.

The stable form takes log(1 - P) from P where P < 1/2 and from 1 - P elsewhere. Instead of choosing (masks and
selects cost more here than arithmetic) it is split into two factors, one of which is always exactly neutral:

    a = atan2(s, max(d, 0))     pi P     where d > 0, else pi/2
    b = atan2(s, max(-d, 0))    pi (1-P) where d < 0, else pi/2
    1 - P = (1 - a/pi) (2 b/pi)          log(1 - P) = log1p(-a/pi) + log(2 b/pi)

(for d < 0 the first factor is 1/2; fl(pi/2) fl(2/pi) = 1 in fp32 and fp64, so the second is 1 for d > 0, and its
logarithm 0, not a rounding error times V). Gradients in closed form, q = s^2 + d^2:

    dloss/dloc = s / (pi q (1-P))        dloss/dscale = d / (pi q (1-P))

Where a score is within s of its threshold, dloss/dloc is about 1/s: with s = 1e-3 one word of one token outweighs all
others of a step. `slope_limit` cuts it (softmax's gradient is at most 1).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.products import mm_into
from cqwen_dist.tiles import WORK_BUFFERS

MIN_SCALE = 1.2e-38  # replaces scale 0, where atan2(0, 0) = 0. So a P of 0 has -log P of 87 to 92, not inf
MIN_DENOMINATOR = 1e-30  # keeps gradients finite where q (1-P) vanishes
FAR = 1e18  # a score so far below its threshold has no loss, no slope and no P, in any precision; its square is finite


class Tile(NamedTuple):
    """Inputs, buffers and sums of one tile of t tokens and n words; fp32 (fp64), operands and ``low`` excepted."""

    x: Tensor  # [t, C] in: loc_u, in the GEMMs' dtype
    g: Tensor  # [t, C] in: scale_u
    w: Tensor  # [n, C] in
    abs_w: Tensor  # [n, C] in
    work: Tensor  # [`TileMaths.buffers`, t, n] of the maths' own
    low: Tensor  # [2, t, n] in the GEMM's dtype for the gradients; [0, t, n] where that is fp32
    offset: Tensor  # [n] in: C - b
    target: Tensor  # [t] in: the label's column in this tile, or anything outside [0, n)
    token_weights: Tensor  # [t] in: factor of the gradients (not of per_token)
    class_weights: Tensor | None  # [n] in
    per_token: Tensor  # [t] fp64, added to: sum_k w_k loss_ik
    prob_sum: Tensor | None  # [t] fp64, added to: sum_k P_ik
    gap_sum: Tensor | None  # [n], added to: sum_i dloss/dloc_ik
    slope_limit: float = 0.0  # of |dloss/dloc| before the weights; 0: none
    skip_labels: bool = False  # the entries at `target` count nothing

    def scores(self) -> tuple[Tensor, Tensor]:
        """loc = x W^T without bias and scale = g |W|^T [t, n], in the first two work buffers."""
        loc, scale = self.work[:2]
        mm_into(self.x, self.w.T, loc)
        mm_into(self.g, self.abs_w.T, scale)
        return loc, scale

    def add_to_gap(self, d_loc: Tensor) -> None:
        """Add the column sums of dloss/dloc [t, n] to `gap_sum`, where it is wanted."""
        if self.gap_sum is not None:
            self.gap_sum.add_(d_loc.sum(0, dtype=self.gap_sum.dtype))


class TileMaths(ABC):
    """Computes a tile. Returns dloss/dloc and dloss/dscale [t, n] with token and class weights, in buffers of the tile;
    with with_grad=False the two are undefined.
    """

    buffers = 0  # how many work buffers it needs, those of the scores included
    multiple = 1  # rows of the tile's buffers begin at multiples of so many numbers

    @abstractmethod
    def __call__(self, tile: Tile, with_grad: bool) -> Sequence[Tensor]:
        """The two gradients; adds to the tile's sums."""


class TorchTile(TileMaths):
    """In torch operations, in place: about 20 passes over buffers that stay in cache."""

    buffers = WORK_BUFFERS["chunked"]

    def __call__(self, tile: Tile, with_grad: bool) -> Sequence[Tensor]:
        (loc, scale), (a, b, log) = tile.scores(), tile.work[2:]
        gap = torch.sub(tile.offset, loc, out=loc)
        scale.clamp_(min=MIN_SCALE)
        at, sign = _label_entries(tile.target, gap)
        if tile.skip_labels:
            gap.view(-1)[at] += (1.0 - sign) * FAR
            sign = sign.abs()
        if tile.prob_sum is not None:
            tile.prob_sum.add_(torch.atan2(scale, gap, out=a).sum(1), alpha=1.0 / math.pi)
        gap.view(-1)[at] *= sign

        torch.clamp(gap, min=0.0, out=a)
        torch.sub(a, gap, out=b)  # max(-d, 0), exactly
        torch.atan2(scale, a, out=a).mul_(-1.0 / math.pi)
        torch.atan2(scale, b, out=b).mul_(2.0 / math.pi)
        tile.per_token.sub_(_row_sum(torch.log1p(a, out=log), tile.class_weights))
        tile.per_token.sub_(_row_sum(torch.log(b, out=log), tile.class_weights))
        if not with_grad:
            return scale, gap

        torch.addcmul(b, a, b, out=a)  # 1 - P
        torch.mul(gap, gap, out=b).addcmul_(scale, scale).mul_(a).add_(MIN_DENOMINATOR)
        torch.div(tile.token_weights[:, None] / math.pi, b, out=b)
        if tile.class_weights is not None:
            b.mul_(tile.class_weights)
        d_loc, d_scale = scale.mul_(b), gap.mul_(b)
        if tile.slope_limit:
            most = tile.slope_limit * tile.token_weights.abs()[:, None]
            most = most if tile.class_weights is None else most * tile.class_weights.abs()
            torch.clamp(d_loc, -most, most, out=d_loc)
        d_loc.view(-1)[at] *= sign
        tile.add_to_gap(d_loc)
        return (tile.low[0].copy_(d_loc), tile.low[1].copy_(d_scale)) if len(tile.low) else (d_loc, d_scale)


def _label_entries(target: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """(flat index of one entry per token of a [t, n] tile [t], -1.0 where it is the token's label, else 1.0 [t])."""
    n = like.shape[1]
    inside = (target >= 0) & (target < n)
    at = torch.arange(0, like.numel(), n, device=like.device) + target.clamp(0, n - 1)
    return at, (1.0 - 2.0 * inside).to(like.dtype)


def _row_sum(x: Tensor, class_weights: Tensor | None) -> Tensor:
    return x.sum(1) if class_weights is None else torch.mv(x, class_weights)
