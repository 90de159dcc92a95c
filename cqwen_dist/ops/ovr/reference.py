"""The OvR loss as its formula reads: the specification and the test oracle.

It materialises several [N, v] tensors and uses autograd, so it is for tests and small shapes.

Shape letters: N tokens, C causal dimensions, v words of the slice.
"""

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
    if targets.terms.slope_limit and gap.requires_grad:
        gap = _limited(gap, scale, is_label, targets.terms.slope_limit)
    bce = -log_prob_above(scale, torch.where(is_label, gap, -gap))  # -log P of the label, else -log(1 - P)
    if targets.class_weights is not None:
        bce = bce * targets.class_weights[:rows]
    per_token = bce.sum(1)
    total, nll, weights = per_token, None, targets.token_weights
    if targets.terms.softmax_weight:
        nll = _softmax_nll(loc, is_label, targets.log_norm) if rows else torch.zeros_like(per_token)
        total = total + targets.terms.softmax_weight * nll
    loss = (weights * torch.where(weights != 0, total, 0.0)).sum()  # a masked token may be inf; 0 * inf is NaN
    prob_sum = prob_above(scale, gap).sum(1).detach() if targets.want_prob_sum else None
    return OvrOutput(loss, per_token.detach(), prob_sum, None if nll is None else nll.detach())


def _softmax_nll(loc: Tensor, is_label: Tensor, log_norm: Tensor | None) -> Tensor:
    """-log softmax(loc) of the label [N], and 0 where it is not in the slice; loc, is_label [N, rows].

    log_norm: [N] of the full vocabulary, to which this slice contributes; None: the slice is all of it. Summed over the
    slices, values and gradients are those of the full vocabulary.
    """
    norm = loc.logsumexp(1)
    if log_norm is not None:  # d log_norm / d norm is the slice's share of the normaliser
        norm = log_norm + (norm - norm.detach()) * (norm.detach() - log_norm).exp()
    return torch.where(is_label.any(1), norm - (loc * is_label).sum(1), norm - norm.detach())


def _limited(gap: Tensor, scale: Tensor, is_label: Tensor, limit: float) -> Tensor:
    """The same gaps [N, rows] with a scaled gradient, so that no |dBCE/dgap| exceeds the limit."""
    at = gap.detach().requires_grad_()
    with torch.enable_grad():
        bce = -log_prob_above(scale.detach(), torch.where(is_label, at, -at))
    (slope,) = torch.autograd.grad(bce.sum(), at)
    share = (limit / slope.abs()).clamp(max=1.0)
    return gap.detach() + (gap - gap.detach()) * share  # value gap, gradient times share
