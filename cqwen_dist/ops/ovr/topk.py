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
    """(loc_S, scale_S, C - loc_S) [N, n] of all n rows, multiplied in the tokens' precision; fp32 (fp64 for fp64)."""
    weight = head.weight.to(u.loc.dtype)
    loc, scale = product(u.loc, weight), product(u.scale, weight.abs())
    if head.bias is not None:
        loc = loc + head.bias.to(loc.dtype)
    return loc, scale, head.threshold.to(loc.dtype) - loc


@torch.no_grad()
def topk(u: Cauchy, head: WordHead, k: int, rank_by: RankBy = "ovr") -> tuple[Tensor, Tensor]:
    """`ovr_topk` of U' [N, C] and a slice of the head. Raises as it does."""
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
        # The k-th best key, then by loc among the words that share it, then the k chosen in order.
        kth = best.topk(k, 1).values[:, -1:]
        pick = torch.where(best > kth, torch.inf, torch.where(best == kth, ties, -torch.inf)).topk(k, 1).indices
        best, ties, ids = best.gather(1, pick), ties.gather(1, pick), ids.gather(1, pick)
        order = torch.argsort(ties, dim=1, descending=True, stable=True)
        order = order.gather(1, torch.argsort(best.gather(1, order), dim=1, descending=True, stable=True))
        best, ties, ids = best.gather(1, order), ties.gather(1, order), ids.gather(1, order)
    return best.float(), ids


def prob_at(u: Cauchy, head: WordHead, word_ids: Tensor) -> Tensor:
    """`ovr_prob_at` of U' [N, C] and a slice of the head: [N, m]. Raises as it does."""
    head.check(u)
    at = word_ids - head.start
    if at.device.type == "cpu" and bool(((at < 0) | (at >= len(head.weight))).any()):
        stop = head.start + len(head.weight)
        raise ValueError(f"word_ids must be in [{head.start}, {stop}), found {word_ids.tolist()}")
    _, scale, gap = _scores(u, head.take(at))
    return prob_above(scale, gap)
