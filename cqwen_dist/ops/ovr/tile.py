"""One tile [t tokens x n words] of the OvR loss: from (loc_S, scale_S) to the loss of each token and the gradients.

Shape letters: C causal dimensions, t tokens and n words of the tile.

Each entry is -log of an angle. For a negative it is -log(1 - P), P = atan2(s, d)/pi, with d = C - loc_S and
s = scale_S. For the label it is -log P, the same function at -d. So the code negates d at the labels first, negates
dloss/dloc there last, and treats all entries alike in between.

The stable form computes log(1 - P) from the angle of the rarer side, p = atan2(s, |d|)/pi <= 1/2, which has full
relative precision:

    d > 0   P = p, 1 - P = 1 - p        log1p(-p)      nearly all words
    d < 0   P = 1 - p, 1 - P = p        log p          a few words

So one angle and one logarithm are computed for the whole tile, and the words (columns) that are above their threshold
for some token are mended. Gradients in closed form, with q = s^2 + d^2:

    dloss/dloc = s / (pi q (1-P))        dloss/dscale = d / (pi q (1-P))

If a score is within s of its threshold, dloss/dloc is about 1/s. With s = 1e-3, one word of one token then outweighs
the rest of the step. `slope_limit` clips it (for comparison: the gradient of softmax is at most 1).

The softmax term, -log softmax(loc_S) of the label, adds softmax(loc_S) - [label] to dloss/dloc. C and the scales have
no part in it, so it is added behind the sum of C's gradient.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.ovr.head import AS_WRITTEN, TermOptions
from cqwen_dist.ops.products import gap_into, mm_into
from cqwen_dist.tiles import WORK_BUFFERS

MIN_SCALE = 1.2e-38  # replaces scale 0, as atan2(0, 0) = 0. A P of 0 then has -log P of 87 to 92 instead of inf
MIN_DENOMINATOR = 1e-30  # keeps gradients finite if q (1-P) vanishes


class Tile(NamedTuple):
    """Inputs, buffers and sums of one tile of t tokens and n words. fp32 (fp64) except for operands and ``low``."""

    x: Tensor  # [t, C] in: loc_u, in the dtype of the GEMMs
    g: Tensor  # [t, C] in: scale_u
    w: Tensor  # [n, C] in
    abs_w: Tensor  # [n, C] in
    work: Tensor  # [`TileMaths.buffers`, t, n] scratch
    low: Tensor  # [2, t, n] in the dtype of the GEMMs for the gradients; [0, t, n] if that is fp32
    offset: Tensor  # [n] in: C - b
    leading: Tensor  # [n] in the dtype of the GEMMs: a part of it, as in `gap_into`
    bias: Tensor  # [n] in: b
    target: Tensor  # [t] in: column of the label in this tile, or any value outside [0, n)
    token_weights: Tensor  # [t] in: factor of the gradients (not of per_token)
    class_weights: Tensor | None  # [n] in
    per_token: Tensor  # [t] fp64, added to: sum_k w_k loss_ik
    prob_sum: Tensor | None  # [t] fp64, added to: sum_k P_ik
    gap_sum: Tensor | None  # [n], added to: sum_i of dloss/dloc_ik without the softmax term, so of -dloss/dC_k
    bias_sum: Tensor | None = None  # [n], added to: sum_i dloss/dloc_ik
    log_norm: Tensor | None = None  # [t] in, for the softmax term
    label_loc: Tensor | None = None  # [t] fp64, added to with the softmax term: loc_S of a label in the tile
    terms: TermOptions = AS_WRITTEN

    def locations(self, gap: bool) -> Tensor:
        """loc = x W^T without bias, or `offset` minus it [t, n], into the first buffer."""
        if gap:
            gap_into(self.offset, self.leading, self.x, self.w.T, self.work[0], self.low)
        else:
            mm_into(self.x, self.w.T, self.work[0])
        return self.work[0]

    def scores(self, gap: bool) -> None:
        """`locations`, and scale = g |W|^T [t, n] into the second buffer."""
        self.locations(gap)
        mm_into(self.g, self.abs_w.T, self.work[1])

    @property
    def threshold(self) -> Tensor:
        """[n] C."""
        return self.offset + self.bias


class TileMaths(ABC):
    """Computes a tile from its scores (`Tile.scores`). Returns dloss/dloc and dloss/dscale [t, n], including token and
    class weights, in buffers of the tile. Both are undefined with with_grad=False.
    """

    reads_gap = True  # whether the first work buffer is C - loc_S; else it is x W^T
    buffers = 0  # number of work buffers, including two for the scores
    multiple = 1  # buffer rows start at multiples of this number of elements

    @abstractmethod
    def __call__(self, tile: Tile, with_grad: bool) -> Sequence[Tensor]:
        """The two gradients; adds to the tile's sums."""

    @abstractmethod
    def log_norm(self, tile: Tile) -> Tensor:
        """log sum_k exp(loc_S,ik) over the tile's words [t], from its `Tile.locations`."""


class TorchTile(TileMaths):
    """The maths as in-place torch operations: about 15 passes over buffers that stay in cache."""

    buffers = WORK_BUFFERS["chunked"]

    def log_norm(self, tile: Tile) -> Tensor:
        return torch.sub(tile.threshold, tile.work[0], out=tile.work[1]).logsumexp(1)

    def __call__(self, tile: Tile, with_grad: bool) -> Sequence[Tensor]:
        gap, scale, a, b = tile.work
        scale.clamp_(min=MIN_SCALE)
        # d = C - loc_S, negated at the labels. Labels are a handful of entries: touching only them is cheaper than a
        # mask over the whole tile.
        at, sign = _label_entries(tile.target, gap)
        label = (1.0 - sign) / 2.0  # 1.0 if the entry is the label, otherwise 0.0
        gap.view(-1)[at] *= sign

        # -p, the angle of the rarer side; then log(1 - P) as if no d were negative
        torch.atan2(scale, torch.abs(gap, out=a), out=a).mul_(-1.0 / math.pi)
        log = torch.log1p(a, out=b)
        above = _columns_above(gap)
        over, p = gap[:, above] < 0, a[:, above].neg()
        log[:, above] = torch.where(over, p.log(), log[:, above])
        tile.per_token.sub_(log.sum(1) if tile.class_weights is None else torch.mv(log, tile.class_weights))
        if tile.prob_sum is not None:
            tile.prob_sum.sub_(a.sum(1)).add_(((1.0 - 2.0 * p) * over).sum(1))
            # A label was counted with the sign of its negated d
            own = gap.view(-1)[at].sign() * (1.0 + 2.0 * a.view(-1)[at])
            tile.prob_sum.add_(own * label)
        if tile.label_loc is not None:
            threshold = tile.threshold[tile.target.clamp(0, gap.shape[1] - 1)]
            tile.label_loc.add_((threshold + gap.view(-1)[at]) * label)
        if not with_grad:
            return scale, gap

        # b becomes weight / (pi q (1-P)), the common factor of both gradients
        a.add_(1.0)  # 1 - P
        a[:, above] = torch.where(over, p, a[:, above])
        torch.mul(gap, gap, out=b).addcmul_(scale, scale).mul_(a).add_(MIN_DENOMINATOR)
        torch.div(tile.token_weights[:, None] / math.pi, b, out=b)
        if tile.class_weights is not None:
            b.mul_(tile.class_weights)
        d_loc = scale.mul_(b)
        if tile.terms.slope_limit:
            most = tile.terms.slope_limit * tile.token_weights.abs()[:, None]
            most = most if tile.class_weights is None else most * tile.class_weights.abs()
            torch.clamp(d_loc, -most, most, out=d_loc)
        d_loc.view(-1)[at] *= sign  # dloss/dscale needs no sign: only d was negated
        if tile.gap_sum is not None:
            tile.gap_sum.add_(d_loc.sum(0, dtype=tile.gap_sum.dtype))
        if tile.log_norm is not None:
            _add_softmax(tile, d_loc, gap, a, at, label)
        if tile.bias_sum is not None:
            tile.bias_sum.add_(d_loc.sum(0, dtype=tile.bias_sum.dtype))
        d_scale = gap.mul_(b)
        return (tile.low[0].copy_(d_loc), tile.low[1].copy_(d_scale)) if len(tile.low) else (d_loc, d_scale)


def _add_softmax(tile: Tile, d_loc: Tensor, gap: Tensor, p: Tensor, at: Tensor, label: Tensor) -> None:
    """Add the gradient of the softmax term, factor * (softmax(loc_S) - [label]), to d_loc [t, n].

    gap: C - loc_S, negated at the labels; p: scratch; at: of `_label_entries`; label [t]: 1.0 if it is
    the label, otherwise 0.0.
    """
    torch.sub(tile.threshold, gap, out=p)
    p.view(-1)[at] += 2.0 * label * gap.view(-1)[at]
    p.sub_(tile.log_norm[:, None]).exp_()  # type: ignore[index]
    factor = tile.terms.softmax_weight * tile.token_weights
    d_loc.addcmul_(p, factor[:, None])
    d_loc.view(-1)[at] -= factor * label


def _columns_above(gap: Tensor) -> Tensor | slice:
    """The words that are above their threshold at some token, if they are few; else all words."""
    if gap.is_cuda or not gap.numel():  # on a GPU the host would have to wait
        return slice(None)
    found = (gap.amin(0) < 0).nonzero()[:, 0]
    return found if 2 * len(found) < gap.shape[1] else slice(None)


def _label_entries(target: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """([t] flat index of one entry per token of a [t, n] tile, [t] -1.0 if this entry is the label, otherwise 1.0)."""
    # One entry per token, also for tokens without a label in this tile: fixed shapes need no host synchronisation
    n = like.shape[1]
    inside = (target >= 0) & (target < n)
    at = torch.arange(0, like.numel(), n, device=like.device) + target.clamp(0, n - 1)
    return at, (1.0 - 2.0 * inside).to(like.dtype)
