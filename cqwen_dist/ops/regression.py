"""The regression loss of numbers and the gates that decide how much of it counts.

The loss of one position is gate_i * NLL_i; masks, sums and denominators are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy

Gate = Callable[[Tensor, Tensor, float], Tensor]


def cauchy_nll(loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
    """-log density of Cauchy(loc, scale) at value, elementwise, in nats (S0 5.2, S2 4.2).

    loc, scale (> 0), value: one shape, fp32 or fp64. Finite, with finite gradients, for every finite value.
    """
    return Cauchy(loc, scale).nll(value)


def gate_alpha(num_mask: Tensor, p_num: Tensor, alpha: float) -> Tensor:
    """m (alpha + (1 - alpha) P): 0 off the numbers; alpha = 1 is the plain masked loss (S0 5.2, S3 2.5.2)."""
    return num_mask.to(p_num.dtype) * (alpha + (1.0 - alpha) * p_num)


def gate_soft(num_mask: Tensor, p_num: Tensor, alpha: float) -> Tensor:
    """(alpha + (1 - alpha) m) P: text positions count a little too, each needs a target value (S4 4.7.3)."""
    return (alpha + (1.0 - alpha) * num_mask.to(p_num.dtype)) * p_num


def gate_hard(num_mask: Tensor, p_num: Tensor, alpha: float) -> Tensor:
    """m P, whatever alpha is (S4 4.2.4)."""
    return num_mask.to(p_num.dtype) * p_num


# Strategies by the name the configuration uses. Every gate takes num_mask [N] (bool or 0/1; the label is <NUM>),
# p_num [N] (P of <NUM>, floating) and alpha in [0, 1], and returns the factor of the NLL, [N] in p_num's dtype.
# A gate passes gradient to p_num. With alpha < 1 that pays the model for *not* predicting <NUM> wherever the NLL is
# positive, so the caller detaches p_num unless the literal seed behaviour is asked for.
GATES: dict[str, Gate] = {"alpha": gate_alpha, "soft": gate_soft, "hard": gate_hard}
