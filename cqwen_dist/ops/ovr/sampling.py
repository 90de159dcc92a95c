"""Negative sampling that leaves the OvR loss and its gradients unbiased.

The loss is a plain sum over words, so a random few of the negatives, each divided by its chance, have the whole sum
as their mean: value and gradients. (A softmax has no such estimate: its words meet inside a logarithm.) What stays
exact: every word that is a label of some token in the batch, and the words named in ``always`` (such as <NUM>), each
against all tokens.

The negatives are drawn in strata of equal mass along the vocabulary, one from each. Byte-pair vocabularies are
ordered by merge, hence about by frequency, so strata of neighbours are alike and vary less than free draws; each rank
of a sharded vocabulary draws from its own rows, which stratifies by shard.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.ovr.head import Targets, WordHead


class NegativeSampling(NamedTuple):
    """draws: negatives drawn per call and slice, >= 1.

    mass: [v] > 0, how often a word is drawn, relative (e.g. its frequency, smoothed); None: all alike.
    always: [a] int64, words of the whole vocabulary that are never left to chance. generator: of the device.
    """

    draws: int
    mass: Tensor | None = None
    always: Tensor | None = None
    generator: torch.Generator | None = None


def sample_negatives(
    head: WordHead, targets: Targets, sampling: NegativeSampling, start: int
) -> tuple[WordHead, Targets]:
    """The problem with the drawn words alone, their class weights carrying 1 / (expected number of draws).

    head: of a slice that begins at `start`; its own start is 0. The weight's rows are selected differentiably: its
    gradient is dense, zero where a word was not drawn. Where the draw would save nothing, both come back as they are.
    On a GPU the distinct labels are counted, which waits for the stream once. Raises ValueError for draws < 1, a mass
    of the wrong shape and a wanted prob_sum.
    """
    _check(head, targets, sampling)
    rows, device = head.rows, head.weight.device
    exact = targets.row
    if sampling.always is not None:
        exact = torch.cat([exact, sampling.always.to(device) - start])
    exact = torch.unique(exact[(exact >= 0) & (exact < rows)])
    if exact.numel() + sampling.draws >= rows:
        return head, targets

    mass = torch.ones(rows, device=device) if sampling.mass is None else sampling.mass[:rows].to(device)
    mass = mass.double().index_fill(0, exact, 0.0)
    ends = mass.cumsum(0)
    within = torch.rand(sampling.draws, dtype=torch.float64, device=device, generator=sampling.generator)
    strata = (torch.arange(sampling.draws, device=device) + within) / sampling.draws
    drawn = torch.searchsorted(ends, strata * (ends[-1] * (1.0 - 1e-12)), right=True)
    words = torch.cat([exact, drawn])

    chance = torch.cat([mass.new_ones(exact.shape[0]), mass[drawn] * (sampling.draws / ends[-1])])
    class_weights = 1.0 / chance if targets.class_weights is None else targets.class_weights[words] / chance
    at = torch.searchsorted(exact, targets.row.clamp(min=0)) if exact.numel() else targets.row
    row = torch.where(targets.row >= 0, at, -1)
    drawn_head = WordHead(  # index_select: its backward adds rows, where that of indexing sorts them first
        head.weight.index_select(0, words),
        None if head.bias is None else head.bias.index_select(0, words),
        head.threshold.index_select(0, words) if head.threshold.ndim else head.threshold,
    )
    return drawn_head, targets._replace(row=row, class_weights=class_weights.to(head.real))


def _check(head: WordHead, targets: Targets, sampling: NegativeSampling) -> None:
    if sampling.draws < 1 or (sampling.mass is not None and sampling.mass.shape != head.weight.shape[:1]):
        found = None if sampling.mass is None else tuple(sampling.mass.shape)
        raise ValueError(f"draws >= 1 and mass of shape ({len(head.weight)},), found {sampling.draws}, {found}")
    if targets.want_prob_sum:
        raise ValueError("sum of P is not known from sampled negatives: ask for it without sampling")
