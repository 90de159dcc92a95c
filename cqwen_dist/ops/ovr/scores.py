"""Scores of the one-vs-rest head for decisions and metrics: the best word, P of single words, label scores.

Works on chunks of the vocabulary; no [N, v] tensor exists.

Shape letters: N tokens, C causal dimensions, v words of the slice, n words of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy, log_prob_above, prob_above
from cqwen_dist.ops.ovr.best import first_best, strength
from cqwen_dist.ops.ovr.head import WordHead, chunk_rows
from cqwen_dist.ops.products import product

RankBy = Literal["ovr", "loc"]


class OvrScores(NamedTuple):
    """Scores for a slice of words, fp32 (fp64 for fp64). loc_S and log P are 0 for a label outside the slice."""

    log_norm: Tensor  # [N] log sum_k exp(loc_S,k): the softmax normaliser, including reserved rows
    label_loc: Tensor  # [N] loc_S of the label
    label_log_p: Tensor  # [N] log P of the label
    above: Tensor  # [N, t] number of words in use with P above each of t thresholds


class TopWord(NamedTuple):
    """The best word of each token."""

    score: Tensor  # [N] fp32: the ranking score
    loc: Tensor  # [N] fp32: loc_S
    word: Tensor  # [N] int64, id in the full vocabulary


@torch.no_grad()
def ovr_scores(u: Cauchy, head: WordHead, labels: Tensor, prob_thresholds: Sequence[float] = ()) -> OvrScores:
    """Scores of U' [N, C] for a slice of the head. No gradient.

    labels: [N] int64, ids in the full vocabulary. prob_thresholds: each in (0, 1); P > p is tested as
    (loc_S - C) > scale_S tan(pi (p - 1/2)). Words from head.used_rows on are never counted. Raises as `WordHead.check`.
    """
    head.check(u)
    n, v = len(u.loc), len(head.weight)
    log_norm = u.loc.new_full((n,), -torch.inf, dtype=head.real)
    above = u.loc.new_zeros((n, len(prob_thresholds)), dtype=head.real)
    slopes = [math.tan(math.pi * (p - 0.5)) for p in prob_thresholds]
    used, step = head.rows, chunk_rows(n, u.loc.shape[1])
    for v0 in range(0, v, step):
        part = head.take(slice(v0, min(v, v0 + step)))
        loc = part.loc(u)
        log_norm = torch.logaddexp(log_norm, loc.logsumexp(1))
        if slopes and v0 < used:
            inside = slice(0, used - v0)
            gap = loc[:, inside] - part.take(inside).threshold.to(head.real)
            scale = product(u.scale, part.weight[inside].to(u.loc.dtype).abs())
            for i, slope in enumerate(slopes):
                above[:, i] += (gap > slope * scale).sum(1)
    return OvrScores(log_norm, *_of_labels(u, head, labels), above)


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


def _scores(u: Cauchy, head: WordHead) -> tuple[Tensor, Tensor, Tensor]:
    """(loc_S, scale_S, C - loc_S) [N, n] of all n rows, with the precision of `WordHead.loc`."""
    loc, scale = head.loc(u), product(u.scale, head.weight.to(u.loc.dtype).abs())
    return loc, scale, head.threshold.to(loc.dtype) - loc


@torch.no_grad()
def top_word(u: Cauchy, head: WordHead, rank_by: RankBy = "ovr") -> TopWord:
    """The best word of each token for U' [N, C] and a slice of the head. No gradient.

    rank_by "ovr": by the decision strength z = (loc_S - C)/scale_S (S4 3.3.3), which orders words like P but does not
    saturate; P = atan2(1, -z)/pi. Scale 0 gives -+inf, or 0 if loc_S = C. "loc": by loc_S. Ties are broken by loc_S,
    then by the lower id. A slice without words gives score -inf and word -1.
    Raises ValueError for an unknown rank_by, and as `WordHead.check`.
    """
    head.check(u)
    if rank_by not in ("ovr", "loc"):
        raise ValueError(f"rank_by must be 'ovr' or 'loc', found {rank_by!r}")
    best = u.loc.new_full((len(u.loc),), -torch.inf, dtype=head.real)
    ties = best.clone()
    words = torch.full(best.shape, -1, dtype=torch.int64, device=best.device)
    step = chunk_rows(*u.loc.shape)
    for v0 in range(0, head.rows, step):
        loc, scale, gap = _scores(u, head.take(slice(v0, min(head.rows, v0 + step))))
        key = loc if rank_by == "loc" else strength(gap, scale)
        at = first_best(key, loc)[:, None]
        key, loc = key.gather(1, at)[:, 0], loc.gather(1, at)[:, 0]
        better = (key > best) | ((key == best) & (loc > ties))
        best, ties = key.where(better, best), loc.where(better, ties)
        words = (at[:, 0] + v0 + head.start).where(better, words)
    return TopWord(best.float(), ties.float(), words)


def probs(u: Cauchy, head: WordHead) -> Tensor:
    """P [N, n] of all words of a small head, such as the <NUM> row, for each token.

    fp32 (fp64 for fp64), differentiable in U', weight, bias and threshold. Raises as `WordHead.check`.
    """
    head.check(u)
    _, scale, gap = _scores(u, head)
    return prob_above(scale, gap)
