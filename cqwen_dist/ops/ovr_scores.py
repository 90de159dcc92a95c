"""What the word head says of each token's label and of the whole vocabulary: for perplexities and label sets.

Over chunks of the vocabulary, never [N, v]; shapes and dtypes as in ``cqwen_dist.ops.ovr.linear_ovr``. No gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import log_prob_above
from cqwen_dist.ops.ovr_heads import chunk_rows
from cqwen_dist.ops.ovr_inputs import check_head, rows_in_use
from cqwen_dist.ops.products import product


class OvrScores(NamedTuple):
    """Of a slice of words, all fp32 (fp64 for fp64); a label outside the slice leaves zeros in the label's two."""

    log_norm: Tensor  # [N] log sum_k exp(loc_S,k): softmax's normaliser, reserved rows too
    label_loc: Tensor  # [N] loc_S of the label
    label_log_p: Tensor  # [N] log P of the label
    above: Tensor  # [N, t] words in use with P above each of the t thresholds


@torch.no_grad()
def ovr_scores(
    loc_u: Tensor,
    scale_u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor | float,
    labels: Tensor,
    *,
    vocab_start: int = 0,
    used_rows: int | None = None,
    prob_thresholds: Sequence[float] = (),
) -> OvrScores:
    """Scores of tokens [N, C] against a slice of words.

    labels: [N] int64 in the whole vocabulary. prob_thresholds: each in (0, 1); P > p is asked as
    (loc_S - C) > scale_S tan(pi (p - 1/2)), which needs no arctangent. One product a chunk, two with thresholds.
    used_rows: words from here on are in no label set. Raises ValueError for shapes that do not fit.
    """
    threshold = check_head(loc_u, scale_u, weight, bias, threshold)
    n, v = loc_u.shape[0], weight.shape[0]
    real = torch.promote_types(weight.dtype, torch.float32)
    log_norm = loc_u.new_full((n,), -torch.inf, dtype=real)
    above = loc_u.new_zeros((n, len(prob_thresholds)), dtype=real)
    slopes = [math.tan(math.pi * (p - 0.5)) for p in prob_thresholds]
    used = rows_in_use(v, vocab_start, used_rows)
    step = chunk_rows(n, loc_u.shape[1])
    for v0 in range(0, v, step):
        part = slice(v0, min(v, v0 + step))
        rows = weight[part].to(loc_u.dtype)
        loc = product(loc_u, rows)
        if bias is not None:
            loc += bias[part].to(real)
        log_norm = torch.logaddexp(log_norm, loc.logsumexp(1))
        if slopes and v0 < used:
            inside = slice(0, used - v0)
            gap = loc[:, inside] - (threshold[part][inside] if threshold.ndim else threshold).to(real)
            scale = product(scale_u, rows[inside].abs())
            for i, slope in enumerate(slopes):
                above[:, i] += (gap > slope * scale).sum(1)
    at = labels - vocab_start
    here = (at >= 0) & (at < v)
    at = at.clamp(0, max(v - 1, 0))
    label_loc = torch.zeros_like(log_norm)
    label_log_p = torch.zeros_like(log_norm)
    if v and n:
        rows = weight[at].to(loc_u.dtype).to(real)
        loc = (loc_u.to(real) * rows).sum(1) + (0.0 if bias is None else bias[at].to(real))
        scale = (scale_u.to(real) * rows.abs()).sum(1)
        log_p = log_prob_above(scale, (threshold[at] if threshold.ndim else threshold).to(real) - loc)
        label_loc, label_log_p = loc.where(here, 0.0), log_p.where(here, 0.0)
    return OvrScores(log_norm, label_loc, label_log_p, above)
