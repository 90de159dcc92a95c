"""The regression loss of numbers: what one position's NLL is, and the gates that decide how much of it counts.

The loss of one position is gate_i * NLL_i; masks, sums and denominators are the caller's. Both factors are strategies:
a gate out of `GATES`, and for the NLL one value, several values (`several_values`) or a value of one of several types
(`by_type`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy

Gate = Callable[[Tensor, Tensor, float], Tensor]


def cauchy_nll(loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
    """-log density of Cauchy(loc, scale) at value, elementwise, in nats (S0 5.2, S2 4.2).

    loc, scale (> 0), value: one shape, fp32 or fp64. Finite, with finite gradients, for every finite value.
    """
    return Cauchy(loc, scale).nll(value)


def several_values(nll: Tensor, weights: Tensor) -> Tensor:
    """sum_i w_i NLL_i (S4 4.7.1): a position has several values, such as the low and the high end of a price.

    nll [N,R]; weights [R], or [N,R] where positions have values of their own (0: this one has none). -> [N]
    """
    return (nll * weights).sum(-1)


def by_type(nll: Tensor, p_type: Tensor, types: Tensor) -> Tensor:
    """P_t NLL_t of the true type t (S4 4.7.2): whether there is a number, then of which type, then its value.

    nll [N,T]: of the value under each type's own law; p_type [N,T]: P of each type, detached by the caller unless the
    literal gradient is wanted (it pays for not predicting the type, as the gate's does); types [N] int64, -1: of no
    type, which counts nothing. -> [N]
    """
    true = torch.nn.functional.one_hot(types.clamp(min=0), nll.shape[-1]).to(nll.dtype)
    true = true * (types >= 0).unsqueeze(-1)
    return (true * p_type * nll).sum(-1)


def number_nll(
    nll: Tensor, value_weights: Tensor | None = None, p_type: Tensor | None = None, types: Tensor | None = None
) -> Tensor:
    """One NLL a position, [N], out of what a model has: [N] as it is; [N,R] by `several_values` or `by_type`.

    Raises ValueError unless exactly one of value_weights and types is given for several values, and neither for one.
    """
    if nll.ndim == 1 and value_weights is None and types is None:
        return nll
    if nll.ndim != 2 or (value_weights is None) == (types is None) or (types is None) != (p_type is None):
        raise ValueError("several values [N,R] need either value_weights, or p_type and types; a single one neither")
    if value_weights is not None:
        return several_values(nll, value_weights)
    assert p_type is not None
    assert types is not None
    return by_type(nll, p_type, types)


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


def gate_of(gate: str | Gate) -> Gate:
    """A gate by its name, or itself."""
    return GATES[gate] if isinstance(gate, str) else gate


def counts_text(gate: str | Gate) -> bool:
    """Whether text counts too, so that L_reg is divided by all positions: the soft gate, or `counts_text` of a gate."""
    return gate_of(gate) is gate_soft or bool(getattr(gate, "counts_text", False))
