"""The OvR loss as its formula reads: the specification and the oracle.

Materialises [N, v] several times and leaves every gradient to autograd. For tests and for small shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import log_prob_above, prob_above


def ovr_reference(
    loc_u: Tensor,
    scale_u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor,
    target: Tensor,
    token_weights: Tensor,
    class_weights: Tensor | None,
    rows: int,
    want_prob_sum: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """sum_i token_weights_i sum_k w_k BCE_ik over the slice's first ``rows`` words (S0 5.1, S4 3.4.3).

    loc_u, scale_u [N, C]; weight [v, C]; bias [v] or None; threshold [] or [v]; target [N] int64, the label's row in
    the slice or -1 for none; token_weights [N], 0 for a token that takes no part. Elementwise maths in fp32 (fp64
    for fp64 inputs). Returns (loss scalar, per_token [N] detached, prob_sum [N] detached or None).
    """
    real = torch.promote_types(weight.dtype, torch.float32)
    weight = weight[:rows]
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
    return loss, per_token.detach(), prob_sum
