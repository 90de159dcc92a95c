"""The best word of a few tokens, for about the cost of one product with W_cls: the larger part of decoding's time.

argmax_k z_k, z_k = (loc_k - C_k)/scale_k, needs every loc_k (one pass over W) but hardly any scale_k = |W_k| . s:
by Cauchy-Schwarz around the mean of s,

    | |W_k| . s  -  mean(s) ||W_k||_1 |  <=  || |W_k| - mean |W_k| ||_2  || s - mean(s) ||_2

and min(s) ||W_k||_1 <= |W_k| . s <= max(s) ||W_k||_1. So two numbers a row, computed once, bound every scale_k and
every z_k. z_k is computed only for words whose upper bound reaches the best lower bound, or for all words if those are
many. The answer is the same. N tokens, C width, v rows.

How many words remain depends on the data: on a GPU the host would wait for that number, and a compiled step cannot have
such a shape. There, and for more than a few tokens, every score is computed in one pass over W (`both_products`).

That pass reads half as much of a copy of W in bf16. Its z are a little wrong, so they only make a shortlist. Every
group of words has a largest z, and the LISTED-th largest of these is a bound. The words that reach it lie in LISTED
groups, the LISTED best words are among them, and their fp32 rows decide. The answer is another one only where rounding
puts LISTED words before the best one: on 8,385 positions of GSM8K and SmolLM2 at none (the largest z alone: at 35).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.both_products import abs_blocks, word_scores
from cqwen_dist.ops.ovr.head import WordHead
from cqwen_dist.ops.products import product

TOGETHER = 64  # tokens at once: about eight fp32 [64, v] are alive
A_FEW = 4  # tokens up to which the bounds pay off on a CPU: their passes over [N, v] cost more for each further token
FEW = 16  # at most one word in so many may be a candidate; gathering more costs as much as reading all
GROUP = 32  # words, one after another
LISTED = 8  # groups
SLACK = 1e-4  # relative, on every term of the bounds: more than fp32 sums of a few thousand terms round


class RowSizes(NamedTuple):
    """What bounds |W_k| . s, [v] fp32 each."""

    l1: Tensor  # ||W_k||_1
    spread: Tensor  # || |W_k| - mean |W_k| ||_2


@torch.no_grad()
def row_sizes(weight: Tensor) -> RowSizes:
    """The sizes of every row of weight [v, C], in one pass without a copy."""
    real = torch.promote_types(weight.dtype, torch.float32)
    l1, spread = (torch.empty(weight.shape[0], dtype=real, device=weight.device) for _ in range(2))
    for rows, block in abs_blocks(weight):
        mean = block.mean(1, keepdim=True)
        l1[rows] = mean[:, 0] * weight.shape[1]
        spread[rows] = (block - mean).norm(dim=1)
    return RowSizes(l1, spread)


@torch.no_grad()
def best_word(u: Cauchy, head: WordHead, sizes: RowSizes | None, near: Tensor | None = None) -> Tensor:
    """argmax P [N] int64 over the words in use, as `scores.top_word` finds it: equal z by the larger loc_S.

    u: U' [N, C]. head: the whole vocabulary's. sizes: `row_sizes` of its weight, for a few tokens on a CPU, or None:
    every score is computed, in fixed shapes. near: its weight in bf16, for a shortlist; no scale_S may be 0 then, where
    every z is infinite.
    """
    if len(u.loc) > TOGETHER:
        parts = zip(u.loc.split(TOGETHER), u.scale.split(TOGETHER), strict=True)
        return torch.cat([best_word(Cauchy(*part), head, sizes, near) for part in parts])
    rows = head.rows
    used = head.take(slice(0, rows))
    if near is not None and rows > GROUP * LISTED:
        return _shortlisted(u, used, near[:rows])
    if sizes is None:
        return strongest(*all_scores(u, used))
    loc = used.loc(u)
    gap = used.threshold.to(loc.dtype) - loc
    words = _candidates(gap, u.scale.to(loc.dtype), RowSizes(*(t[:rows] for t in sizes)))
    if not 0 < words.numel() * FEW <= rows:  # 0 candidates: nan scores
        return strongest(*all_scores(u, used))
    scale = product(u.scale.to(used.weight.dtype), used.weight[words].abs())
    return words[strongest(gap[:, words], Cauchy(loc[:, words], scale))]


def all_scores(u: Cauchy, used: WordHead) -> tuple[Tensor, Cauchy]:
    """(C - loc_S, S) [N, v] of a head whose words are all in use, in one pass over its weight."""
    loc, scale = word_scores(u, used.weight)
    loc = loc if used.bias is None else loc + used.bias.to(loc.dtype)
    return used.threshold.to(loc.dtype) - loc, Cauchy(loc, scale)


def _shortlisted(u: Cauchy, used: WordHead, near: Tensor) -> Tensor:
    """`best_word` of a head whose words are all in use, by its weight in bf16 and a few of its own rows."""
    gap, scores = all_scores(u.to(near.dtype), used._replace(weight=near))
    rows = gap.shape[1]
    z = pad(strength(gap, scores.scale), (0, -rows % GROUP), value=-torch.inf).unflatten(1, (-1, GROUP))
    first = z.amax(2).topk(LISTED, sorted=False)
    groups = first.indices[:, :, None]
    words = groups * GROUP + torch.arange(GROUP, device=gap.device)
    # other words of these groups give their places to one word: the same row again comes from a cache
    listed = z.gather(1, groups.expand_as(words)) >= first.values.amin(1)[:, None, None]
    words = words.where(listed, words[:, :1, :1]).flatten(1).clamp(max=rows - 1)
    law, gap = used.take(words).of_own(Cauchy(u.loc[:, None], u.scale[:, None]))
    ties = _of_best(strength(gap, law.scale), law.loc)
    return words.where(ties == ties.amax(1, keepdim=True), rows).amin(1)  # groups are in no order


def strongest(gap: Tensor, scores: Cauchy) -> Tensor:
    """The index [N] of the best of S [N, v], gap = C - loc_S; equal strength is ordered by the larger loc_S."""
    return first_best(strength(gap, scores.scale), scores.loc)


def _candidates(gap: Tensor, s: Tensor, sizes: RowSizes) -> Tensor:
    """The words [m] that may be the best of some token; gap [N, v], s [N, C]."""
    mean = s.mean(1, keepdim=True)
    centre = mean * sizes.l1
    radius = (s - mean).norm(dim=1, keepdim=True) * sizes.spread
    more, less = 1 + SLACK, 1 - SLACK
    low = torch.maximum(centre * less - radius * more, s.amin(1, keepdim=True) * sizes.l1 * less)
    high = torch.minimum(centre * more + radius * more, s.amax(1, keepdim=True) * sizes.l1 * more)
    behind = gap > 0  # P < 1/2: a larger scale helps
    least = strength(gap, torch.where(behind, low, high)).amax(1, keepdim=True)
    return (strength(gap, torch.where(behind, high, low)) >= least).any(0).nonzero()[:, 0]


def strength(gap: Tensor, scale: Tensor) -> Tensor:
    """z = -gap/scale; at scale 0 -+inf, and 0 where the gap is 0 too."""
    return torch.where(gap == 0, 0.0, -gap / scale)


def first_best(key: Tensor, ties: Tensor) -> Tensor:
    """The index of the largest key of each row; equal keys are ordered by the larger tie, then by the lower index."""
    return _of_best(key, ties).argmax(1)


def _of_best(key: Tensor, ties: Tensor) -> Tensor:
    """The ties of the largest keys of each row; -inf at all others."""
    return torch.where(key == key.amax(1, keepdim=True), ties, -torch.inf)
