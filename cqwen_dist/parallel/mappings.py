"""Collectives with gradients, in conjugate pairs; the group is always passed.

    gather_tokens          forward: all-gather of rows      backward: reduce-scatter (sum)
    scatter_sum_tokens     forward: reduce-scatter (sum)    backward: all-gather of rows
    sum_partials           forward: all-reduce (sum)        backward: nothing (identity)

Rows are tokens; the ranks may hold different numbers of them (`counts`, one a rank, 0 allowed). On the wire they
are padded to the largest count; outside, padding is never seen. A group of one, or None, costs nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cqwen_dist.parallel.collectives import all_gather_into, reduce_scatter_into, sum_over


def _all_gather(rows: Tensor, counts: list[int], group: ProcessGroup | None) -> Tensor:
    """[N_r, ...] -> [sum N, ...], rank 0's rows first."""
    if group is None or group.size() == 1:
        return rows
    longest = max(counts)
    even = min(counts) == longest
    padded = rows.contiguous()
    if not even:
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
    gathered = rows.new_empty((group.size() * longest, *rows.shape[1:]))
    all_gather_into(gathered, padded, group)
    if even:
        return gathered
    return torch.cat([gathered[r * longest : r * longest + n] for r, n in enumerate(counts)])


def _reduce_scatter(rows: Tensor, counts: list[int], group: ProcessGroup | None) -> Tensor:
    """[sum N, ...] -> [N_r, ...], summed over the ranks."""
    if group is None or group.size() == 1:
        return rows
    longest = max(counts)
    padded = rows.contiguous()
    if min(counts) != longest:
        parts = rows.new_zeros((group.size(), longest, *rows.shape[1:]))
        for rank, part in enumerate(rows.split(counts)):
            parts[rank, : counts[rank]] = part
        padded = parts.flatten(0, 1)
    mine = rows.new_empty((longest, *rows.shape[1:]))
    reduce_scatter_into(mine, padded, group)
    return mine[: counts[group.rank()]]


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], group: ProcessGroup | None) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _all_gather(rows, counts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grad, ctx.counts, ctx.group), None, None


class _ScatterSumTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], group: ProcessGroup | None) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _reduce_scatter(rows, counts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grad, ctx.counts, ctx.group), None, None


class _SumPartials(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: ProcessGroup | None) -> Tensor:
        return sum_over(partial.clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def gather_tokens(rows: Tensor, counts: list[int], group: ProcessGroup | None) -> Tensor:
    """All tokens of the group on every rank.

    forward: all-gather, [N_r, ...] -> [sum N, ...]. backward: reduce-scatter, every rank's gradient of the
    gathered rows is summed and each rank keeps its own rows' share.
    """
    return rows if group is None or group.size() == 1 else _GatherTokens.apply(rows, counts, group)


def scatter_sum_tokens(rows: Tensor, counts: list[int], group: ProcessGroup | None) -> Tensor:
    """Each rank's own tokens of values that the group's ranks hold in parts.

    forward: reduce-scatter (sum), [sum N, ...] -> [N_r, ...]. backward: all-gather.
    """
    return rows if group is None or group.size() == 1 else _ScatterSumTokens.apply(rows, counts, group)


def sum_partials(partial: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over the group of values each rank holds a part of.

    forward: all-reduce (sum). backward: identity (every rank differentiates the whole with regard to its own part).
    """
    return partial if group is None or group.size() == 1 else _SumPartials.apply(partial, group)


def exchange_counts(count: int, group: ProcessGroup | None, device: torch.device) -> list[int]:
    """How many tokens each rank of the group holds; one small all-gather and one host synchronisation."""
    if group is None or group.size() == 1:
        return [count]
    counts = torch.empty(group.size(), dtype=torch.int64, device=device)
    all_gather_into(counts, torch.tensor([count], device=device), group)
    return [int(n) for n in counts.tolist()]
