"""What decisions ask of the one-vs-rest head, over chunks of the vocabulary: never [N, v]."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy, prob_above
from cqwen_dist.ops.ovr.head import WordHead, chunk_rows
from cqwen_dist.ops.products import product

RankBy = Literal["ovr", "loc"]


def _scores(u: Cauchy, head: WordHead) -> tuple[Tensor, Tensor, Tensor]:
    """(loc_S, scale_S, C - loc_S) [N, n] of all n rows, as `WordHead.loc`."""
    loc, scale = head.loc(u), product(u.scale, head.weight.to(u.loc.dtype).abs())
    return loc, scale, head.threshold.to(loc.dtype) - loc


@torch.no_grad()
def topk(u: Cauchy, head: WordHead, k: int, rank_by: RankBy = "ovr") -> tuple[Tensor, Tensor]:
    """The k best words of each token, U' [N, C], in a slice of the head. No gradient.

    rank_by "ovr": by the decision strength z = (loc_S - C)/scale_S (S4 3.3.3), which orders words as P does but does
    not saturate; scale 0 gives -+inf, or 0 where loc_S = C; equal z are ordered by the larger loc_S. "loc": by loc_S.

    Returns (scores [N, k] fp32: z or loc_S, best first; ids [N, k] int64 in the whole vocabulary). A slice of fewer
    than k words is filled up with score -inf, id -1. P of a z is atan2(1, -z)/pi.
    Raises ValueError for k < 1 and an unknown rank_by, and as `WordHead.check`.
    """
    head.check(u)
    if k < 1 or rank_by not in ("ovr", "loc"):
        raise ValueError(f"k must be >= 1 and rank_by 'ovr' or 'loc', found {k}, {rank_by!r}")
    best = u.loc.new_full((len(u.loc), k), -torch.inf, dtype=head.real)  # key to rank by
    ties = best.clone()  # loc_S, which orders equal keys
    ids = torch.full(best.shape, -1, dtype=torch.int64, device=best.device)
    step = chunk_rows(*u.loc.shape)
    for v0 in range(0, head.rows, step):
        loc, scale, gap = _scores(u, head.take(slice(v0, min(head.rows, v0 + step))))
        key = loc if rank_by == "loc" else torch.where(gap == 0, 0.0, -gap / scale)
        words = torch.arange(v0, v0 + loc.shape[1], device=loc.device).expand_as(loc) + head.start
        best, ties, ids = torch.cat([best, key], 1), torch.cat([ties, loc], 1), torch.cat([ids, words], 1)
        # Choose all words above the k-th best key, and by loc among those that share it; then sort the k chosen.
        kth = best.topk(k, 1).values[:, -1:]
        pick = torch.where(best > kth, torch.inf, torch.where(best == kth, ties, -torch.inf)).topk(k, 1).indices
        best, ties, ids = best.gather(1, pick), ties.gather(1, pick), ids.gather(1, pick)
        order = torch.argsort(ties, dim=1, descending=True, stable=True)
        order = order.gather(1, torch.argsort(best.gather(1, order), dim=1, descending=True, stable=True))
        best, ties, ids = best.gather(1, order), ties.gather(1, order), ids.gather(1, order)
    return best.float(), ids


def prob_at(u: Cauchy, head: WordHead, word_ids: Tensor) -> Tensor:
    """P of the words word_ids [m] int64 (whole vocabulary, all in the slice) at every token: [N, m].

    fp32 (fp64 for fp64), differentiable in U', weight, bias and threshold. For few words, such as <NUM>.
    Raises as `WordHead.check`, and on a CPU ValueError for a word outside the slice.
    """
    head.check(u)
    at = word_ids - head.start
    if at.device.type == "cpu" and bool(((at < 0) | (at >= len(head.weight))).any()):
        stop = head.start + len(head.weight)
        raise ValueError(f"word_ids must be in [{head.start}, {stop}), found {word_ids.tolist()}")
    _, scale, gap = _scores(u, head.take(at))
    return prob_above(scale, gap)
