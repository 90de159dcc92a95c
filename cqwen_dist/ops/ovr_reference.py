"""The OvR loss as its formula reads: the specification and the oracle.

Materialises [N, v] several times and leaves every gradient to autograd. For tests and for small shapes.
"""

from __future__ import annotations

import torch

from cqwen_dist.ops.cauchy import log_prob_above, prob_above
from cqwen_dist.ops.ovr_inputs import OvrInputs, OvrSums


def ovr_reference(inputs: OvrInputs) -> OvrSums:
    """sum_i token_weights_i sum_k w_k BCE_ik over the slice's words in use (S0 5.1 formulas 3-5, S4 3.4.3)."""
    loc_u, scale_u, weight, bias, threshold, target, token_weights, class_weights, rows, want_prob_sum = inputs
    real = inputs.real
    weight = weight[:rows].to(loc_u.dtype)
    loc = (loc_u @ weight.T).to(real)
    if bias is not None:
        loc = loc + bias[:rows].to(real)
    scale = (scale_u @ weight.abs().T).to(real)
    gap = (threshold[:rows] if threshold.ndim else threshold).to(real) - loc

    is_label = torch.arange(rows, device=target.device) == target[:, None]
    bce = -log_prob_above(scale, torch.where(is_label, gap, -gap))  # -log P of the label, -log(1-P) of the others
    if class_weights is not None:
        bce = bce * class_weights[:rows].to(real)
    per_token = bce.sum(1)
    loss = (token_weights.to(real) * torch.where(token_weights != 0, per_token, 0.0)).sum()
    prob_sum = prob_above(scale, gap).sum(1).detach() if want_prob_sum else None
    return OvrSums(loss, per_token.detach(), prob_sum)
