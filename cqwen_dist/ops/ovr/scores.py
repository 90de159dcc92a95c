"""Scores of the one-vs-rest head for decisions and metrics: the best word, P of single words, label scores.

Works on chunks of the vocabulary; no [N, v] tensor exists.

Shape letters: N tokens, C causal dimensions, v words of the slice, n words of a chunk.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy, log_prob_above, prob_above
from cqwen_dist.ops.ovr.head import WordHead, chunk_rows
from cqwen_dist.ops.ovr.loss import OvrOptions, ovr_loss
from cqwen_dist.ops.ovr.seen import RankBy, Seen, TopWord, Wanted
from cqwen_dist.ops.ovr.tile import MIN_SCALE
from cqwen_dist.ops.products import gap_into, gemm_dtype, product


class OvrScores(NamedTuple):
    """Scores for a slice of words, fp32 (fp64 for fp64). loc_S and log P are 0 for a label outside the slice."""

    log_norm: Tensor  # [N] log sum_k exp(loc_S,k): the softmax normaliser, including reserved rows
    label_loc: Tensor  # [N] loc_S of the label
    label_log_p: Tensor  # [N] log P of the label
    above: Tensor  # [N, t] number of words in use with P above each of t thresholds
    per_token: Tensor  # [N] the loss; 0 by rank_by "loc"
    prob_sum: Tensor  # [N] sum of P; 0 by rank_by "loc"
    best: TopWord  # of the words in use


@torch.no_grad()
def ovr_scores(
    u: Cauchy, head: WordHead, labels: Tensor, prob_thresholds: Sequence[float] = (), rank_by: RankBy = "ovr"
) -> OvrScores:
    """Scores of U' [N, C] for a slice of the head, in one pass over its words. No gradient.

    labels: [N] int64, ids in the full vocabulary. prob_thresholds: each in (0, 1). rank_by: the best word is that with
    the largest P, or with the largest loc_S; then scales are not computed. The loss and the sum of P count all
    words, all else those below head.used_rows.
    Raises ValueError for an unknown rank_by, and as `ovr_loss`.
    """
    head.check(u)
    if rank_by not in ("ovr", "loc"):
        raise ValueError(f"rank_by must be 'ovr' or 'loc', found {rank_by!r}")
    wanted = Wanted(head.used_rows, True, tuple(prob_thresholds))
    if rank_by == "ovr":
        out = ovr_loss(u, head._replace(used_rows=None), labels, None, OvrOptions(want_prob_sum=True, seen=wanted))
        assert out.prob_sum is not None
        seen, found, best = out.seen, (out.per_token, out.prob_sum), out.best
    else:
        seen, found = Seen(len(u.loc), head, wanted), (torch.zeros(len(u.loc), device=u.loc.device),) * 2
        for v0 in range(0, len(head.weight), step := chunk_rows(u.loc)):
            seen.add(slice(0, len(u.loc)), v0, -head.take(slice(v0, v0 + step)).loc(u), None)
        best = seen.best(u)
    return OvrScores(seen.log_norm, *_of_labels(u, head, labels), seen.above, *found, best)


@torch.no_grad()
def prob_sums(loc: Tensor, scale: Tensor, head: WordHead) -> Tensor:
    """Sum of P [N] over the words in use for U' with locations [N, C] and one scale [C] for all tokens."""
    gemm = gemm_dtype(loc.dtype, loc.device)
    total = torch.zeros(len(loc), dtype=torch.float64, device=loc.device)
    for v0 in range(0, head.rows, step := chunk_rows(loc)):
        part = head.take(slice(v0, min(head.rows, v0 + step)))
        x, rows, offset = loc.to(gemm), part.weight.to(loc.dtype), part.threshold.to(head.real).expand(len(part.weight))
        offset = offset if part.bias is None else offset - part.bias.to(head.real)
        shape = len(x), len(rows)
        gap, low = x.new_empty(shape, dtype=head.real), x.new_empty(1, *shape)
        gap_into(offset, offset.to(gemm), x, rows.to(gemm).T, gap, low)
        scales = product(scale[None], rows.abs()).clamp(min=MIN_SCALE).expand_as(gap)
        total += torch.atan2(scales, gap, out=gap).sum(1)
    return (total / math.pi).to(head.real)


def _of_labels(u: Cauchy, head: WordHead, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(loc_S, log P) of each token's label [N]; 0 if the label is outside the slice."""
    v = len(head.weight)
    if not v:
        return (torch.zeros(len(labels), dtype=head.real, device=labels.device),) * 2
    at = labels - head.start
    here = (at >= 0) & (at < v)
    law, gap = head.take(at.clamp(0, v - 1)).of_own(u)
    return law.loc.where(here, 0.0), log_prob_above(law.scale, gap).where(here, 0.0)


def prob_of(u: Cauchy, head: WordHead, words: Tensor) -> Tensor:
    """P [N] of one word per token; words [N] int64, all in the slice."""
    law, gap = head.take(words - head.start).of_own(u)
    return prob_above(law.scale, gap)


def probs(u: Cauchy, head: WordHead) -> Tensor:
    """P [N, n] of all words of a small head, such as the <NUM> row, for each token.

    fp32 (fp64 for fp64), differentiable in U', weight, bias and threshold. Raises as `WordHead.check`.
    """
    head.check(u)
    loc, scale = head.loc(u), product(u.scale, head.weight.to(u.loc.dtype).abs())
    return prob_above(scale, head.threshold.to(loc.dtype) - loc)
