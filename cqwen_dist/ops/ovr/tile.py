"""One tile [t tokens x n words] of the OvR loss: from (loc_S, scale_S) to the loss of each token and the gradients.

Shape letters: C causal dimensions, t tokens and n words of the tile.

Each entry is -log of an angle. For a negative it is -log(1 - P), P = atan2(s, d)/pi, with d = C - loc_S and
s = scale_S. For the label it is -log P, the same function at -d. So the code negates d at the labels first, negates
dloss/dloc there last, and treats all entries alike in between.

The stable form computes log(1 - P) from P if P < 1/2 and from 1 - P otherwise. A select would cost more here than
arithmetic. So 1 - P is split into two factors, and one of them is always exactly neutral:

    a = atan2(s, max(d, 0))     pi P     where d > 0, else pi/2
    b = atan2(s, max(-d, 0))    pi (1-P) where d < 0, else pi/2
    1 - P = (1 - a/pi) (2 b/pi)          log(1 - P) = log1p(-a/pi) + log(2 b/pi)

For d < 0 the first factor is 1/2. For d > 0 the second is exactly 1, since fl(pi/2) fl(2/pi) = 1 in fp32 and fp64; its
logarithm is 0, not a rounding error times V. Gradients in closed form, with q = s^2 + d^2:

    dloss/dloc = s / (pi q (1-P))        dloss/dscale = d / (pi q (1-P))

If a score is within s of its threshold, dloss/dloc is about 1/s. With s = 1e-3, one word of one token then outweighs
the rest of the step. `slope_limit` clips it (for comparison: the gradient of softmax is at most 1).
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

MIN_SCALE = 1.2e-38  # replaces scale 0, as atan2(0, 0) = 0. A P of 0 then has -log P of 87 to 92 instead of inf
MIN_DENOMINATOR = 1e-30  # keeps gradients finite if q (1-P) vanishes
FAR = 1e18  # a gap of this size gives zero loss, slope and P in any precision, and its square is still finite


class Tile(NamedTuple):
    """Inputs, buffers and sums of one tile of t tokens and n words. fp32 (fp64) except for operands and ``low``."""

    x: Tensor  # [t, C] in: loc_u, in the dtype of the GEMMs
    g: Tensor  # [t, C] in: scale_u
    w: Tensor  # [n, C] in
    abs_w: Tensor  # [n, C] in
    work: Tensor  # [`TileMaths.buffers`, t, n] scratch
    low: Tensor  # [2, t, n] in the dtype of the GEMMs for the gradients; [0, t, n] if that is fp32
    offset: Tensor  # [n] in: C - b
    target: Tensor  # [t] in: column of the label in this tile, or any value outside [0, n)
    token_weights: Tensor  # [t] in: factor of the gradients (not of per_token)
    class_weights: Tensor | None  # [n] in
    per_token: Tensor  # [t] fp64, added to: sum_k w_k loss_ik
    prob_sum: Tensor | None  # [t] fp64, added to: sum_k P_ik
    gap_sum: Tensor | None  # [n], added to: sum_i dloss/dloc_ik
    slope_limit: float = 0.0  # limit of |dloss/dloc| before the weights; 0: none
    skip_labels: bool = False  # leave out the entries at `target`

    def scores(self) -> tuple[Tensor, Tensor]:
        """loc = x W^T without bias and scale = g |W|^T [t, n], in the first two work buffers."""
        loc, scale = self.work[:2]
        mm_into(self.x, self.w.T, loc)
        mm_into(self.g, self.abs_w.T, scale)
        return loc, scale

    def add_to_gap(self, d_loc: Tensor) -> None:
        """Add the column sums of dloss/dloc [t, n] to `gap_sum` if it is wanted."""
        if self.gap_sum is not None:
            self.gap_sum.add_(d_loc.sum(0, dtype=self.gap_sum.dtype))


class TileMaths(ABC):
    """Computes a tile. Returns dloss/dloc and dloss/dscale [t, n], including token and class weights, in buffers of the
    tile. Both are undefined with with_grad=False.
    """

    buffers = 0  # number of work buffers, including two for the scores
    multiple = 1  # buffer rows start at multiples of this many elements

    @abstractmethod
    def __call__(self, tile: Tile, with_grad: bool) -> Sequence[Tensor]:
        """The two gradients; adds to the tile's sums."""


class TorchTile(TileMaths):
    """The maths as in-place torch operations: about 20 passes over buffers that stay in cache."""

    buffers = WORK_BUFFERS["chunked"]

    def __call__(self, tile: Tile, with_grad: bool) -> Sequence[Tensor]:
        (loc, scale), (a, b, log) = tile.scores(), tile.work[2:]
        # d = C - b - x W^T, negated at the labels; P is summed before, as it needs the real sign
        gap = torch.sub(tile.offset, loc, out=loc)
        scale.clamp_(min=MIN_SCALE)
        # Labels are a handful of entries: touching only them is cheaper than a mask over the whole tile
        at, sign = _label_entries(tile.target, gap)
        if tile.skip_labels:
            gap.view(-1)[at] += (1.0 - sign) * FAR
            sign = sign.abs()
        if tile.prob_sum is not None:
            tile.prob_sum.add_(torch.atan2(scale, gap, out=a).sum(1), alpha=1.0 / math.pi)
        gap.view(-1)[at] *= sign

        # The two factors of 1 - P, and the loss from their logarithms. Both are kept for the gradients.
        torch.clamp(gap, min=0.0, out=a)
        torch.sub(a, gap, out=b)  # max(-d, 0), exactly
        torch.atan2(scale, a, out=a).mul_(-1.0 / math.pi)
        torch.atan2(scale, b, out=b).mul_(2.0 / math.pi)
        tile.per_token.sub_(_row_sum(torch.log1p(a, out=log), tile.class_weights))
        tile.per_token.sub_(_row_sum(torch.log(b, out=log), tile.class_weights))
        if not with_grad:
            return scale, gap

        # b becomes weight / (pi q (1-P)), the common factor of both gradients
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
        d_loc.view(-1)[at] *= sign  # dloss/dscale needs no sign: only d was negated
        tile.add_to_gap(d_loc)
        return (tile.low[0].copy_(d_loc), tile.low[1].copy_(d_scale)) if len(tile.low) else (d_loc, d_scale)


def _label_entries(target: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """([t] flat index of one entry per token of a [t, n] tile, [t] -1.0 if this entry is the label, otherwise 1.0)."""
    # One entry per token, also for tokens without a label in this tile: fixed shapes need no host synchronisation
    n = like.shape[1]
    inside = (target >= 0) & (target < n)
    at = torch.arange(0, like.numel(), n, device=like.device) + target.clamp(0, n - 1)
    return at, (1.0 - 2.0 * inside).to(like.dtype)


def _row_sum(x: Tensor, class_weights: Tensor | None) -> Tensor:
    return x.sum(1) if class_weights is None else torch.mv(x, class_weights)
