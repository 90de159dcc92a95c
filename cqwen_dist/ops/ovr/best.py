"""The best word of a few tokens for about the cost of one product with W_cls, which dominates the time of decoding.

argmax_k z_k, z_k = (loc_k - C_k)/scale_k, needs each loc_k (one pass over W) but only a few scale_k = |W_k| . s. By
Cauchy-Schwarz around the mean of s,

    | |W_k| . s  -  mean(s) ||W_k||_1 |  <=  || |W_k| - mean |W_k| ||_2  || s - mean(s) ||_2

and min(s) ||W_k||_1 <= |W_k| . s <= max(s) ||W_k||_1. So two numbers per row, computed once, bound all scale_k and
z_k. The exact z_k is only computed for words whose upper bound reaches the best lower bound, or for all words if there
are too many of these. The result is exact.

The number of remaining words depends on the data. On a GPU the host would have to wait for it, and a compiled step
cannot have such a shape. So on a GPU, and for more than a few tokens, one pass over W computes all scores
(`both_products`).

With a bf16 copy of W this pass reads half as much. Its z have rounding errors, so they only give a shortlist. The
LISTED-th largest of all group maxima of z is a bound. The words above this bound are in LISTED groups and include the
LISTED best words, and fp32 rows decide between them. The result differs only if rounding puts LISTED words before the
best one. On 8,385 positions of GSM8K with SmolLM2 this never happened (without a shortlist: at 35 positions).

Shape letters: N tokens, C causal dimensions, v words of the slice, m candidates.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.both_products import abs_blocks, word_scores
from cqwen_dist.ops.ovr.head import WordHead
from cqwen_dist.ops.products import product

TOGETHER = 64  # tokens per pass: about eight fp32 [64, v] tensors exist at a time
A_FEW = 4  # most tokens for which the bounds pay off on a CPU: each token adds passes over [N, v]
FEW = 16  # at most 1 / FEW of the words may be candidates; gathering more rows costs as much as reading all
GROUP = 32  # consecutive words per group
LISTED = 8  # groups in the shortlist
NEVER = 1e30  # C - loc_S of a word that cannot be chosen
SLACK = 1e-4  # relative slack of the bounds: more than the rounding of fp32 sums of a few thousand terms


class RowSizes(NamedTuple):
    """Row norms that bound |W_k| . s, [v] fp32 each."""

    l1: Tensor  # ||W_k||_1
    spread: Tensor  # || |W_k| - mean |W_k| ||_2


class Shut(NamedTuple):
    """Words that some texts cannot go on with."""

    rows: Tensor  # [N] bool: these texts
    words: Tensor  # [n] int64

    def on(self, scores: Tensor, score: float) -> Tensor:
        """scores [N,v] with `score` at these words of these texts, in place."""
        part = scores.index_select(1, self.words).masked_fill_(self.rows.unsqueeze(1), score)
        return scores.index_copy_(1, self.words, part)


@torch.no_grad()
def row_sizes(weight: Tensor) -> RowSizes:
    """The norms of all rows of weight [v, C], in one pass without a copy."""
    real = torch.promote_types(weight.dtype, torch.float32)
    l1, spread = (torch.empty(weight.shape[0], dtype=real, device=weight.device) for _ in range(2))
    for rows, block in abs_blocks(weight):
        mean = block.mean(1, keepdim=True)
        l1[rows] = mean[:, 0] * weight.shape[1]
        spread[rows] = (block - mean).norm(dim=1)
    return RowSizes(l1, spread)


@torch.no_grad()
def best_word(
    u: Cauchy, head: WordHead, sizes: RowSizes | None, near: Tensor | None = None, shut: Shut | None = None
) -> Tensor:
    """argmax P [N] int64 over the words in use, with the tie rule of `seen.Seen`.

    u: U' [N, C]. head: the full vocabulary. sizes: `row_sizes` of its weight, for a few tokens on a CPU; None computes
    all scores in fixed shapes. near: the weight in bf16, for a shortlist. No scale_S may be 0 then, since infinite z
    have no order. shut: words that are not chosen.
    """
    if len(u.loc) > TOGETHER:
        found = []
        for part in (slice(at, at + TOGETHER) for at in range(0, len(u.loc), TOGETHER)):
            own = None if shut is None else Shut(shut.rows[part], shut.words)
            found.append(best_word(Cauchy(u.loc[part], u.scale[part]), head, sizes, near, own))
        return torch.cat(found)
    rows = head.rows
    used = head.take(slice(0, rows))
    if near is not None and rows > GROUP * LISTED:
        return _shortlisted(u, used, near[:rows], shut)
    if sizes is None:
        return strongest(*all_scores(u, used, shut))
    loc = used.loc(u)
    gap = used.threshold.to(loc.dtype) - loc
    gap = gap if shut is None else shut.on(gap, NEVER)
    words = _candidates(gap, u.scale.to(loc.dtype), RowSizes(*(t[:rows] for t in sizes)))
    if not 0 < words.numel() * FEW <= rows:  # no candidates at all: the scores are NaN
        return strongest(*all_scores(u, used, shut))
    scale = product(u.scale.to(used.weight.dtype), used.weight[words].abs())
    return words[strongest(gap[:, words], Cauchy(loc[:, words], scale))]


def all_scores(u: Cauchy, used: WordHead, shut: Shut | None = None) -> tuple[Tensor, Cauchy]:
    """(C - loc_S, S) [N, v] in one pass over the weight. All words of `used` must be in use. shut: words that are far
    below C."""
    loc, scale = word_scores(u, used.weight)
    loc = loc if used.bias is None else loc + used.bias.to(loc.dtype)
    gap = used.threshold.to(loc.dtype) - loc
    return gap if shut is None else shut.on(gap, NEVER), Cauchy(loc, scale)


def _shortlisted(u: Cauchy, used: WordHead, near: Tensor, shut: Shut | None) -> Tensor:
    """`best_word` from the bf16 weight and a few fp32 rows. All words of `used` must be in use."""
    gap, scores = all_scores(u.to(near.dtype), used._replace(weight=near), shut)
    rows = gap.shape[1]
    # Maxima of groups: a topk over V / 32 values instead of V
    z = pad(strength(gap, scores.scale), (0, -rows % GROUP), value=-torch.inf).unflatten(1, (-1, GROUP))
    first = z.amax(2).topk(LISTED, sorted=False)
    groups = first.indices[:, :, None]
    words = groups * GROUP + torch.arange(GROUP, device=gap.device)
    # Replace words below the bound by one word: its row is read again from a cache, and the shape stays fixed
    listed = z.gather(1, groups.expand_as(words)) >= first.values.amin(1)[:, None, None]
    words = words.where(listed, words[:, :1, :1]).flatten(1).clamp(max=rows - 1)
    law, gap = used.take(words).of_own(Cauchy(u.loc[:, None], u.scale[:, None]))
    if shut is not None:
        gap = gap.masked_fill(shut.rows[:, None] & torch.isin(words, shut.words), NEVER)
    ties = _of_best(strength(gap, law.scale), law.loc)
    return words.where(ties == ties.amax(1, keepdim=True), rows).amin(1)  # lowest id; topk leaves groups unordered


def strongest(gap: Tensor, scores: Cauchy) -> Tensor:
    """Index [...] of the best of S [..., v], with gap = C - loc_S. Ties go to the larger loc_S."""
    return first_best(strength(gap, scores.scale), scores.loc)


def _candidates(gap: Tensor, s: Tensor, sizes: RowSizes) -> Tensor:
    """The words [m] that can be the best for at least one token; gap [N, v], s [N, C]."""
    mean = s.mean(1, keepdim=True)
    centre = mean * sizes.l1
    radius = (s - mean).norm(dim=1, keepdim=True) * sizes.spread
    more, less = 1 + SLACK, 1 - SLACK
    low = torch.maximum(centre * less - radius * more, s.amin(1, keepdim=True) * sizes.l1 * less)
    high = torch.minimum(centre * more + radius * more, s.amax(1, keepdim=True) * sizes.l1 * more)
    # Which end of the scale's bounds gives the largest z depends on the side of the threshold
    behind = gap > 0  # P < 1/2: a larger scale helps
    least = strength(gap, torch.where(behind, low, high)).amax(1, keepdim=True)
    return (strength(gap, torch.where(behind, high, low)) >= least).any(0).nonzero()[:, 0]


def strength(gap: Tensor, scale: Tensor) -> Tensor:
    """z = -gap/scale; for scale 0 this is -+inf, or 0 if the gap is 0 too."""
    return (-gap / scale).masked_fill_(gap == 0, 0.0)


def first_best(key: Tensor, ties: Tensor) -> Tensor:
    """Index of the largest key of each row. Equal keys go to the larger `ties` value, then to the lower index."""
    return _of_best(key, ties).argmax(-1)


def _of_best(key: Tensor, ties: Tensor) -> Tensor:
    """The `ties` values at the largest keys of each row; -inf at other places."""
    return ties.masked_fill(key != key.amax(-1, keepdim=True), -torch.inf)
