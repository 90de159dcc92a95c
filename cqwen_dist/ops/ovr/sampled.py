"""The one-vs-rest loss with a part of the negatives: an unbiased estimate of it, and of every gradient.

The loss of a token is a sum over words (`loss`), so a random part of it, each term divided by the probability that it
was drawn, has the whole sum as its mean. So have the gradients, which are sums over the same words. Three parts:

    the label's own word      always, once, by the row of every token
    the first ids, and <NUM>  always: low ids are the frequent words of a BPE vocabulary, where most of the loss is
    the rest                  whole tiles of rows; each is drawn with the same probability, and counts 1 / that

An entry that is a token's label is left out of the drawn rows (`Targets.skip_labels`), so it never counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.head import OvrOutput, Targets, WordHead
from cqwen_dist.ops.ovr.reference import bce_of_rows

TILE = 64  # rows
STRATUM = 16  # neighbouring tiles, of which as nearly as possible the same share is drawn
FREQUENT = 0.5  # of the words that a share buys: the first ones, which are always computed


class Drawn(NamedTuple):
    """The rows of a slice whose negatives are computed, in ascending order, none twice."""

    always: Tensor  # [a] int64
    some: Tensor  # [m] int64
    factor: float  # of the terms of `some`: 1 / the probability of being drawn

    def to(self, device: torch.device) -> Drawn:
        """The same words on a device."""
        return Drawn(self.always.to(device, non_blocking=True), self.some.to(device, non_blocking=True), self.factor)


def draw_words(
    words: int, share: float, key: Sequence[int], special: int = 0, start: int = 0, stop: int | None = None
) -> Drawn:
    """Draw about share * words of the words [0, words), those of a slice [start, stop) as rows of it, on the CPU.

    key: whole numbers >= 0; the same key draws the same words, whatever the slice is. special: a word that is always
    computed. The tiles of each stratum are shuffled, the strata put in a row, and every 1/rate-th tile of it is taken,
    from a random first one on: each tile has exactly the same probability, and each stratum has its share to within
    one tile.
    """
    first = round(FREQUENT * share * words) if share < 1 else words
    rate = (share * words - first) / max(words - first, 1) or 1.0
    tiles = -(-(words - first) // TILE)
    generator = np.random.default_rng(key)
    strata = [generator.permutation(np.arange(at, min(tiles, at + STRATUM))) for at in range(0, tiles, STRATUM)]
    steps = np.floor(np.arange(tiles + 1) * rate + generator.random())
    taken = np.sort(np.concatenate([np.zeros(0, np.int64), *strata])[np.diff(steps) > 0])
    ids = (first + taken[:, None] * TILE + np.arange(TILE)).ravel()
    stop = words if stop is None else min(stop, words)
    always = np.union1d(np.arange(first), special)

    def of_slice(ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids[(ids >= start) & (ids < stop)] - start)

    return Drawn(of_slice(always), of_slice(ids[ids != special]), 1.0 / rate)


def ovr_sampled(
    u: Cauchy, head: WordHead, targets: Targets, drawn: Drawn, full: Callable[[Cauchy, WordHead, Targets], OvrOutput]
) -> OvrOutput:
    """The estimate for U' [N, C]; head: its start is 0. full: the loss of all rows of a head, as one computes it.

    Its prob_sum [N] is an estimate too. The gradients of rows that were not drawn are zeros.
    """
    if not head.rows:
        return full(u, head, targets)
    weights = targets.class_weights
    every, some, own = _take(head, (drawn.always, drawn.some, targets.row.clamp(min=0)))
    here = targets.row >= 0
    bce = torch.where(here, bce_of_rows(u.to(head.real), own, here, targets.slope_limit), 0.0)
    prob_sum = torch.where(here, (-bce.detach()).exp(), 0.0)
    if weights is not None:
        bce = bce * weights[targets.row.clamp(min=0)]
    loss, per_token = (targets.token_weights * bce).sum(), bce.detach()
    for rows, part, factor in ((drawn.always, every, 1.0), (drawn.some, some, drawn.factor)):
        if not len(rows):
            continue
        of_part = targets._replace(
            row=_place(targets.row, rows),
            token_weights=targets.token_weights * factor,
            class_weights=None if weights is None else weights[rows],
            skip_labels=True,
        )
        out = full(u, part, of_part)
        loss, per_token = loss + out.loss, per_token + factor * out.per_token
        prob_sum = prob_sum if out.prob_sum is None else prob_sum + factor * out.prob_sum
    return OvrOutput(loss, per_token, prob_sum if targets.want_prob_sum else None)


def _place(row: Tensor, rows: Tensor) -> Tensor:
    """Where each of row [N] is among the ascending rows [m], m > 0; -1 where it is not."""
    at = torch.searchsorted(rows, row).clamp(max=len(rows) - 1)
    return torch.where(rows[at] == row, at, -1)


def _take(head: WordHead, index: tuple[Tensor, Tensor, Tensor]) -> list[WordHead]:
    """`head.take` of each index, whose gradients meet in one tensor of the parameter's size."""

    def parts(whole: Tensor | None) -> Sequence[Any]:
        if whole is None or not whole.ndim:
            return [whole] * len(index)
        return _Rows.apply(whole, *index)

    return [WordHead(*rows) for rows in zip(*map(parts, head[:3]), strict=True)]


class _Rows(torch.autograd.Function):
    """Rows of a parameter, three times; the labels' in fp32 (fp64), as each is a sum over tokens of its own.

    backward: no atomic additions, so the same bits every time.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, always: Tensor, some: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(always, some, labels)
        ctx.rows, ctx.dtype = len(whole), whole.dtype
        real = torch.promote_types(whole.dtype, torch.float32)
        drawn = (whole.index_select(0, index) for index in (always, some))
        return *drawn, whole.index_select(0, labels).to(real)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        always, some, labels = ctx.saved_tensors
        width = gradients[2].shape[1:].numel()
        of_labels = gradients[2].reshape(len(labels), width)  # labels repeat
        total = torch.ops.aten.embedding_dense_backward(of_labels, labels, ctx.rows, -1, False)
        for index, gradient in zip((always, some), gradients[:2], strict=True):
            # rows do not: the order is without meaning
            total.index_add_(0, index, gradient.reshape(len(index), width).to(total.dtype))
        return total.view(ctx.rows, *gradients[2].shape[1:]).to(ctx.dtype), None, None, None
