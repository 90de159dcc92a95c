"""Scores of each token's label and of the whole vocabulary, for perplexities and label sets.

Over chunks of the vocabulary, never [N, v]. No gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy, log_prob_above
from cqwen_dist.ops.ovr.head import WordHead, chunk_rows
from cqwen_dist.ops.products import product


class OvrScores(NamedTuple):
    """Scores of a slice of words, fp32 (fp64 for fp64). A label outside the slice has loc_S and log P 0."""

    log_norm: Tensor  # [N] log sum_k exp(loc_S,k): softmax's normaliser, reserved rows too
    label_loc: Tensor  # [N] loc_S of the label
    label_log_p: Tensor  # [N] log P of the label
    above: Tensor  # [N, t] words in use with P above each of the t thresholds


@torch.no_grad()
def ovr_scores(u: Cauchy, head: WordHead, labels: Tensor, prob_thresholds: Sequence[float] = ()) -> OvrScores:
    """Scores of U' [N, C] against a slice of the head.

    labels: [N] int64 in the whole vocabulary. prob_thresholds: each in (0, 1); P > p is computed as
    (loc_S - C) > scale_S tan(pi (p - 1/2)). Words from head.used_rows on are in no label set. Raises as
    `WordHead.check`.
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
    """(loc_S, log P) of each token's own label [N], 0 where the slice has no such word."""
    v = len(head.weight)
    if not v:
        return (torch.zeros(len(labels), dtype=head.real, device=labels.device),) * 2
    at = labels - head.start
    here = (at >= 0) & (at < v)
    own = head.take(at.clamp(0, v - 1))
    rows = own.weight.to(u.loc.dtype).to(head.real)
    loc = (u.loc.to(head.real) * rows).sum(1) + (0.0 if own.bias is None else own.bias.to(head.real))
    scale = (u.scale.to(head.real) * rows.abs()).sum(1)
    log_p = log_prob_above(scale, own.threshold.to(head.real) - loc)
    return loc.where(here, 0.0), log_p.where(here, 0.0)
