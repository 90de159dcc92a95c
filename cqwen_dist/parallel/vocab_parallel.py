"""The OvR loss over a vocabulary whose rows are spread over the ranks of a group.

A rank passes its own tokens and holds its own rows. Tokens are gathered in the group, each rank computes the
loss of *all* of them on *its* rows (`ops.ovr.linear_ovr`, a slice), and one sum gives each token its total: OvR
has no normaliser, so nothing else has to be agreed on. Communication is

    forward    all-gather    loc_u, scale_u [N,C], labels, weights [N]; reduce-scatter of 3 numbers a token
    backward   reduce-scatter of the gradients of loc_u, scale_u [N,C]

whatever V is (`plan.comm` has the bytes). Nothing is overlapped: the transfers take (in bytes) 8 (g-1) / (12 V) of
the loss's flops, 4 % of its time in a group of 8 inside a node (600 TFLOP/s, 450 GB/s; worked out, not measured).
The gradients of rows are of the group's tokens: the caller sums them over the replica group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cqwen_dist.ops.ovr import linear_ovr, ovr_prob_at, ovr_topk
from cqwen_dist.parallel.mappings import exchange_counts, gather_tokens, scatter_sum_tokens, sum_partials


def vocab_range(vocab_size: int, rank: int, size: int) -> tuple[int, int]:
    """[start, stop) of a rank's rows: torch.chunk's ceil-sized ranges; the last may be short or empty."""
    rows = -(-vocab_size // size)
    return min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size)


class VocabParallelOutput(NamedTuple):
    """loss: scalar, of the whole group, differentiable; the rest is of this rank's own tokens."""

    loss: Tensor
    per_token: Tensor  # [N_r] fp32, detached, over the whole vocabulary
    prob_sum: Tensor  # [N_r] fp32, detached: sum of P over the whole vocabulary; NaN where negatives are sampled
    p_num: Tensor | None  # [N_r] P of <NUM>, differentiable; None without num_token_id


def vocab_parallel_ovr(
    loc_u: Tensor,
    scale_u: Tensor,
    weight_shard: Tensor,
    bias_shard: Tensor | None,
    threshold_shard: Tensor,
    labels: Tensor,
    *,
    group: ProcessGroup | None,
    vocab_start: int,
    token_weights: Tensor | None = None,
    num_token_id: int | None = None,
    token_counts: list[int] | None = None,
    **options: Any,
) -> VocabParallelOutput:
    """`linear_ovr` over the vocabulary of a group.

    loc_u, scale_u [N_r,C], labels, token_weights [N_r]: this rank's tokens (N_r may differ between ranks, may be 0).
    weight_shard [v,C], bias_shard [v], threshold_shard [] or [v]: this rank's rows [vocab_start, vocab_start+v).
    token_counts: N_r of every rank of the group, where the caller knows them (else they are exchanged).
    options: what `linear_ovr` takes besides (class_weights [v] of this rank's rows, impl, sampling, ...).
    group: the vocabulary group, or None for a single process. Collective over it; autograd's backward too, on
    every rank or none.
    """
    counts = token_counts or exchange_counts(loc_u.shape[0], group, loc_u.device)
    if token_weights is None:
        token_weights = torch.ones(labels.shape, device=labels.device)
    all_loc = gather_tokens(loc_u, counts, group)
    all_scale = gather_tokens(scale_u, counts, group)
    all_labels = gather_tokens(labels, counts, group)
    all_weights = gather_tokens(token_weights, counts, group)
    out = linear_ovr(
        all_loc,
        all_scale,
        weight_shard,
        bias_shard,
        threshold_shard,
        all_labels,
        token_weights=all_weights,
        vocab_start=vocab_start,
        want_prob_sum=options.get("sampling") is None,
        **options,
    )
    prob_sum = torch.full_like(out.per_token, torch.nan) if out.prob_sum is None else out.prob_sum
    columns = [out.per_token, prob_sum]
    if num_token_id is not None:
        row = num_token_id - vocab_start
        if 0 <= row < weight_shard.shape[0]:
            rows = slice(row, row + 1)
            bias = None if bias_shard is None else bias_shard[rows]
            threshold = threshold_shard if threshold_shard.ndim == 0 else threshold_shard[rows]
            word = torch.zeros(1, dtype=torch.int64, device=loc_u.device)
            p_all = ovr_prob_at(all_loc, all_scale, weight_shard[rows], bias, threshold, word)[:, 0]
        else:  # as differentiable as the owner's, so that backward's collective is entered by every rank or none
            inputs = (all_loc, all_scale, weight_shard, bias_shard, threshold_shard)
            needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
            p_all = torch.zeros(all_loc.shape[0], device=loc_u.device, requires_grad=needs_grad)
        columns.append(p_all)
    own = scatter_sum_tokens(torch.stack([c.float() for c in columns], dim=1), counts, group)
    return VocabParallelOutput(
        loss=sum_partials(out.loss, group),
        per_token=own[:, 0].detach(),
        prob_sum=own[:, 1].detach(),
        p_num=own[:, 2] if num_token_id is not None else None,
    )


@torch.no_grad()
def vocab_parallel_topk(
    loc_u: Tensor,
    scale_u: Tensor,
    weight_shard: Tensor,
    bias_shard: Tensor | None,
    threshold_shard: Tensor,
    k: int,
    *,
    group: ProcessGroup | None,
    vocab_start: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The k best words of each own token over the whole vocabulary: (scores [N_r,k], ids [N_r,k]).

    Every rank finds the k best of its rows for all tokens; the group's candidates are gathered and merged, equal
    scores told apart by loc_S as in one process. Options and scores are `ops.ovr.ovr_topk`'s. Collective over `group`.
    """
    if group is None or group.size() == 1:
        return ovr_topk(
            loc_u, scale_u, weight_shard, bias_shard, threshold_shard, k, vocab_start=vocab_start, **options
        )
    counts = exchange_counts(loc_u.shape[0], group, loc_u.device)
    all_loc, all_scale = gather_tokens(loc_u, counts, group), gather_tokens(scale_u, counts, group)
    n = all_loc.shape[0]
    scores, ids = ovr_topk(
        all_loc, all_scale, weight_shard, bias_shard, threshold_shard, k, vocab_start=vocab_start, **options
    )
    loc = torch.full_like(scores, -torch.inf)  # where there is no word (id -1), as on a rank of too few rows
    if weight_shard.shape[0]:
        at = (ids - vocab_start).clamp(min=0)
        bias = 0.0 if bias_shard is None else bias_shard[at]
        loc = (
            (torch.einsum("nc,nkc->nk", all_loc, weight_shard[at].to(all_loc.dtype)) + bias)
            .float()
            .where(ids >= 0, loc)
        )
    size = group.size()
    scores, loc, ids = (
        gather_tokens(part, [n] * size, group).view(size, n, k).transpose(0, 1).reshape(n, size * k)
        for part in (scores, loc, ids)
    )
    # stable sorts: by loc_S, then by score; the lower rank stays first among the wholly equal
    order = loc.sort(dim=1, descending=True, stable=True).indices
    order = order.gather(1, scores.gather(1, order).sort(dim=1, descending=True, stable=True).indices)[:, :k]
    start = sum(counts[: group.rank()])
    mine = slice(start, start + counts[group.rank()])
    return scores.gather(1, order)[mine], ids.gather(1, order)[mine]
