"""Collectives with gradients, in conjugate pairs. The group is always passed; None is a group of one.

    gather_tokens          forward: all-gather of rows      backward: reduce-scatter (sum)
    scatter_sum_tokens     forward: reduce-scatter (sum)    backward: all-gather of rows
    sum_partials           forward: all-reduce (sum)        backward: nothing (identity)

Rows are tokens. ranks may have different numbers of tokens (`counts`, one per rank, 0 allowed). The transfer pads them
to the largest count. A group of one rank does not communicate.

`over_sequence` is attention over texts that are split across ranks along the positions (DeepSpeed's Ulysses). Each rank
keeps a slice of every text, with all heads. One exchange gives it all positions for a slice of the heads, a second one
returns the output at its positions:

    forward    all-to-all of q, k, v    [B,T/g,heads,D] -> [B,T,heads/g,D]    attention    all-to-all of its output
    backward   the same of the gradients, in reverse order

Each rank then has the gradient of the *total* loss with respect to its positions, and the sum over ranks is the full
gradient. No other layer looks at other positions.

DeepSpeed's `DistributedAttention` does the exchanges. Its wrapper for transformers (`UlyssesSPAttentionHF`) takes one
micro-batch size for the whole run, gathers position ids in every layer, and replaces "sdpa" for the whole process.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cqwen_dist.parallel.collectives import all_gather_into, gather_rows, reduce_scatter_into, sum_over

Mapping = Callable[[Tensor, list[int], ProcessGroup], Tensor]


def _all_gather(rows: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
    """[N_r, ...] -> [sum N, ...], rank 0's rows first."""
    longest = max(counts)
    padded = rows.contiguous()
    if min(counts) != longest:  # the collective takes equal parts only
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
    gathered = rows.new_empty((group.size() * longest, *rows.shape[1:]))
    all_gather_into(gathered, padded, group)
    if min(counts) == longest:
        return gathered
    # Cut the padding off again, so that the loss sees real tokens only
    return torch.cat([part[:count] for part, count in zip(gathered.split(longest), counts, strict=True)])


def _reduce_scatter(rows: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
    """[sum N, ...] -> [N_r, ...], summed over the ranks."""
    longest = max(counts)
    padded = rows.contiguous()
    if min(counts) != longest:  # as in `_all_gather`; added zero rows are cut off after the sum
        parts = rows.new_zeros((group.size(), longest, *rows.shape[1:]))
        for rank, part in enumerate(rows.split(counts)):
            parts[rank, : counts[rank]] = part
        padded = parts.flatten(0, 1)
    mine = rows.new_empty((longest, *rows.shape[1:]))
    reduce_scatter_into(mine, padded, group)
    return mine[: counts[group.rank()]]


class _Conjugate(torch.autograd.Function):
    """Runs one mapping forward and its conjugate backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, mapping: Mapping, conjugate: Mapping, counts: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.conjugate, ctx.counts, ctx.group = conjugate, counts, group
        return mapping(rows, counts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.conjugate(grad, ctx.counts, ctx.group), None, None, None, None


def _mapped(
    rows: Tensor, mapping: Mapping, conjugate: Mapping, counts: list[int], group: ProcessGroup | None
) -> Tensor:
    if group is None or group.size() == 1:
        return rows
    return _Conjugate.apply(rows, mapping, conjugate, counts, group)


def gather_tokens(rows: Tensor, counts: list[int], group: ProcessGroup | None) -> Tensor:
    """All tokens of the group on every rank, [N_r, ...] -> [sum N, ...]."""
    return _mapped(rows, _all_gather, _reduce_scatter, counts, group)


def scatter_sum_tokens(rows: Tensor, counts: list[int], group: ProcessGroup | None) -> Tensor:
    """Sum over the ranks; each rank keeps its tokens, [sum N, ...] -> [N_r, ...]."""
    return _mapped(rows, _reduce_scatter, _all_gather, counts, group)


def sum_partials(partial: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum one value per rank over the group. Each rank differentiates the sum only by its value."""
    # The gradient of a sum by each term is 1. An all-reduce in backward would count the loss once per rank.
    return _mapped(partial, lambda own, _, among: sum_over(own.clone(), among), lambda grad, *_: grad, [], group)


def exchange_counts(count: int, group: ProcessGroup | None, device: torch.device) -> list[int]:
    """Tokens per rank of the group. One small all-gather, which synchronises with the host."""
    if group is None or group.size() == 1:
        return [count]
    return gather_rows(torch.tensor(count, device=device), group).tolist()


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [B,T,heads,D], k and v [B,T,kv_heads,D] -> [B,T,heads,D]
Spread = Callable[[Attend, Tensor, Tensor, Tensor], Tensor]


def over_sequence(group: ProcessGroup) -> Spread:
    """Build (attend, q, k, v of this rank's positions) -> output at these positions, for attention over all positions.

    The group size divides the heads. It divides the key heads, or is a multiple (key heads are then repeated).
    Forward and backward are collective over the group.
    """
    from deepspeed.sequence.layer import DistributedAttention  # here: it takes seconds, and few runs need it

    spread = DistributedAttention(lambda q, k, v, attend: attend(q, k, v), group, scatter_idx=2, gather_idx=1)

    @torch.compiler.disable
    def run(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (times := group.size() // k.shape[2]) > 1:
            k, v = (x.repeat_interleave(times, dim=2) for x in (k, v))
        return spread(q, k, v, 0, None, attend)

    return run
