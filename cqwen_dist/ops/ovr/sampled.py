"""The one-vs-rest loss with sampled negatives: an unbiased estimate of the loss and all gradients.

The loss of a token is a sum over words (`loss`). Draw some terms at random and divide each by its probability: the mean
is the full sum. The same holds for the gradients, which are sums over the same words. There are three parts:

    the label                 always, once per token
    the first ids, and <NUM>  always: low ids are the frequent words of a BPE vocabulary and have most of the loss
    other words               tiles of consecutive rows, all drawn with one probability p; each term counts 1 / p

The drawn rows skip the labels (`Targets.skip_labels`), so a label never counts twice.

Shape letters: N tokens, C causal dimensions, a always computed words, m drawn words.
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

TILE = 64  # rows per tile
STRATUM = 16  # neighbouring tiles; each stratum gets the same share of drawn tiles, up to rounding
FREQUENT = 0.5  # fraction of the budget for the first ids, which are always computed


class Drawn(NamedTuple):
    """The rows of a slice to compute as negatives, ascending and unique."""

    always: Tensor  # [a] int64
    some: Tensor  # [m] int64
    factor: float  # factor of the terms in `some`: 1 / drawing probability

    def to(self, device: torch.device) -> Drawn:
        """Copy to a device."""
        return Drawn(self.always.to(device, non_blocking=True), self.some.to(device, non_blocking=True), self.factor)


def draw_words(
    words: int, share: float, key: Sequence[int], special: int = 0, start: int = 0, stop: int | None = None
) -> Drawn:
    """Draw about share * words of the words [0, words). Returns rows of the slice [start, stop), on the CPU.

    key: integers >= 0. The same key draws the same words for all slices, so ranks need no communication. special: a
    word that is always computed. Tiles are shuffled within each stratum, and systematic sampling takes every 1/rate-th
    tile from a random start. So all tiles have exactly the same probability, and each stratum gets its share to within
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
    """The estimate for U' [N, C]. head: must have start 0. full: function for the loss of all rows of a head.

    prob_sum [N] is an estimate too. The gradients of rows that were not drawn are zero.
    """
    if not head.rows:
        return full(u, head, targets)
    weights = targets.class_weights
    # The label of each token: exact, in fp32
    every, some, own = _take(head, (drawn.always, drawn.some, targets.row.clamp(min=0)))
    here = targets.row >= 0
    bce = torch.where(here, bce_of_rows(u.to(head.real), own, here, targets.slope_limit), 0.0)
    prob_sum = torch.where(here, (-bce.detach()).exp(), 0.0)
    if weights is not None:
        bce = bce * weights[targets.row.clamp(min=0)]
    loss, per_token = (targets.token_weights * bce).sum(), bce.detach()
    # The negatives: two small heads for the usual loss, the drawn one with its factor in the token weights
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
    """Index of each row [N] in the ascending rows [m], m > 0; -1 if absent."""
    at = torch.searchsorted(rows, row).clamp(max=len(rows) - 1)
    return torch.where(rows[at] == row, at, -1)


def _take(head: WordHead, index: tuple[Tensor, Tensor, Tensor]) -> list[WordHead]:
    """`head.take` for each index. All gradients are summed in one tensor of the parameter's size."""

    def parts(whole: Tensor | None) -> Sequence[Any]:
        if whole is None or not whole.ndim:
            return [whole] * len(index)
        return _Rows.apply(whole, *index)

    return [WordHead(*rows) for rows in zip(*map(parts, head[:3]), strict=True)]


class _Rows(torch.autograd.Function):
    """Three gathers of rows of a parameter. Label rows are fp32 (fp64), as their gradients are summed over tokens.

    Backward uses no atomic additions, so its bits are reproducible.
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
        of_labels = gradients[2].reshape(len(labels), width)  # labels repeat: `index_add_` would add atomically
        total = torch.ops.aten.embedding_dense_backward(of_labels, labels, ctx.rows, -1, False)
        for index, gradient in zip((always, some), gradients[:2], strict=True):
            # These rows are unique, so the order of additions does not matter
            total.index_add_(0, index, gradient.reshape(len(index), width).to(total.dtype))
        return total.view(ctx.rows, *gradients[2].shape[1:]).to(ctx.dtype), None, None, None
