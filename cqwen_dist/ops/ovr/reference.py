"""The OvR loss as its formula reads: the specification and the test oracle.

It materialises several [N, v] tensors and uses autograd, so it is for tests and small shapes.

Shape letters: N tokens, C causal dimensions, v words of the slice, M single (token, word) pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy, log_prob_above, prob_above
from cqwen_dist.ops.ovr.head import OvrOutput, Targets, WordHead


def ovr_reference(u: Cauchy, head: WordHead, targets: Targets) -> OvrOutput:
    """sum_i token_weights_i sum_k w_k BCE_ik over the words in use (S0 5.1 formulas 3-5, S4 3.4.3)."""
    real, rows = head.real, head.rows
    used = head.take(slice(0, rows))
    weight = used.weight.to(u.loc.dtype)
    loc = (u.loc @ weight.T).to(real)
    if used.bias is not None:
        loc = loc + used.bias.to(real)
    scale = (u.scale @ weight.abs().T).to(real)
    gap = used.threshold.to(real) - loc

    is_label = torch.arange(rows, device=loc.device) == targets.row[:, None]
    bce = _bce(gap, scale, is_label, targets.slope_limit)
    if targets.skip_labels:
        bce = torch.where(is_label, 0.0, bce)
    if targets.class_weights is not None:
        bce = bce * targets.class_weights[:rows]
    per_token = bce.sum(1)
    weights = targets.token_weights
    loss = (weights * torch.where(weights != 0, per_token, 0.0)).sum()  # a masked token may be inf; 0 * inf is NaN
    if not targets.want_prob_sum:
        return OvrOutput(loss, per_token.detach(), None)
    prob = prob_above(scale, gap)
    return OvrOutput(loss, per_token.detach(), (prob * ~(is_label & targets.skip_labels)).sum(1).detach())


def ovr_partial(u: Cauchy, head: WordHead, words: Tensor, slope_limit: float = 0.0) -> Tensor:
    """BCE of single words [M]; 0 for words outside the rows in use (S4 3.3.1: only labelled words are trained).

    u: U' of each label's token [M, C]. words: [M] int64, ids of the full vocabulary; w marks a word that follows, ~w a
    word that does not. Differentiable in U', weight, bias and threshold; fp32 (fp64 for fp64).
    """
    row = torch.where(words < 0, ~words, words) - head.start
    here = (row >= 0) & (row < head.rows)
    if not len(head.weight):
        return (u.loc.sum(1) + u.scale.sum(1)).to(head.real) * 0.0  # in the graph: all ranks must join in backward
    law, gap = head.take(row.clamp(0, len(head.weight) - 1)).of_own(u.to(head.real))
    return torch.where(here, _bce(gap, law.scale, words >= 0, slope_limit), 0.0)


def _bce(gap: Tensor, scale: Tensor, is_label: Tensor, slope_limit: float) -> Tensor:
    """-log P if is_label, otherwise -log(1 - P); slope_limit as in `linear_ovr`."""
    if slope_limit and gap.requires_grad:
        gap = _limited(gap, scale, is_label, slope_limit)
    return -log_prob_above(scale, torch.where(is_label, gap, -gap))


def _limited(gap: Tensor, scale: Tensor, is_label: Tensor, limit: float) -> Tensor:
    """The same gaps [N, rows] with a scaled gradient, so that no |dBCE/dgap| exceeds the limit."""
    at = gap.detach().requires_grad_()
    with torch.enable_grad():
        bce = -log_prob_above(scale.detach(), torch.where(is_label, at, -at))
    (slope,) = torch.autograd.grad(bce.sum(), at)
    share = (limit / slope.abs()).clamp(max=1.0)
    return gap.detach() + (gap - gap.detach()) * share  # value gap, gradient times share
