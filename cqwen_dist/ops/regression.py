"""The regression loss of numbers: one NLL per position (`number_nll`), and gates that weight it.

The loss of a position is gate_i * NLL_i. The caller applies masks, sums and denominators.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Gate = Callable[[Tensor, Tensor, float], Tensor]


def number_nll(
    nll: Tensor, value_weights: Tensor | None = None, p_type: Tensor | None = None, types: Tensor | None = None
) -> Tensor:
    """One NLL per position, [N] (or [B,T] for [B,T,...]).

    nll [N]: returned unchanged.
    nll [N,R] of R values, such as the low and the high end of a price: sum_i w_i NLL_i (S4 4.7.1). value_weights [R],
        or [N,R] if positions differ (0: this value is missing).
    nll [N,T] of one value under the law of each of T types: P_t NLL_t of the true type t (S4 4.7.2). p_type [N,T]: P of
        each type. The caller detaches it, unless the literal gradient is wanted, which rewards not predicting the type.
        types [N] int64; -1 means no type and gives 0.

    Raises ValueError for any other combination of arguments.
    """
    if nll.ndim == 1 and value_weights is None and types is None:
        return nll
    if nll.ndim < 2 or (value_weights is None) == (types is None) or (types is None) != (p_type is None):
        raise ValueError("several values [N,R] need either value_weights, or p_type and types; a single one neither")
    if value_weights is not None:
        return (nll * value_weights).sum(-1)
    assert types is not None
    assert p_type is not None
    true = torch.nn.functional.one_hot(types.clamp(min=0), nll.shape[-1]).to(nll.dtype)
    true = true * (types >= 0).unsqueeze(-1)
    return (true * p_type * nll).sum(-1)


def gate_alpha(num_mask: Tensor, p_num: Tensor, alpha: float) -> Tensor:
    """m (alpha + (1 - alpha) P): 0 for text; alpha = 1 is the plain masked loss (S0 5.2, S3 2.5.2)."""
    return num_mask.to(p_num.dtype) * (alpha + (1.0 - alpha) * p_num)


def gate_soft(num_mask: Tensor, p_num: Tensor, alpha: float) -> Tensor:
    """(alpha + (1 - alpha) m) P: text positions also count a little, so they need a target value (S4 4.7.3)."""
    return (alpha + (1.0 - alpha) * num_mask.to(p_num.dtype)) * p_num


def gate_hard(num_mask: Tensor, p_num: Tensor, alpha: float) -> Tensor:
    """m P; ignores alpha (S4 4.2.4)."""
    return num_mask.to(p_num.dtype) * p_num


# Names for `loss.gate`. A gate takes num_mask [N] (bool or 0/1: the label is <NUM>), p_num [N] (P of <NUM>, floating)
# and alpha in [0, 1]. It returns the factor of the NLL, [N] in p_num's dtype, with a gradient to p_num. With alpha < 1
# this gradient rewards *not* predicting <NUM> wherever the NLL is positive, so the caller detaches p_num by default.
GATES: dict[str, Gate] = {"alpha": gate_alpha, "soft": gate_soft, "hard": gate_hard}


def gate_of(gate: str | Gate) -> Gate:
    """The gate of this name; a function is returned unchanged."""
    return GATES[gate] if isinstance(gate, str) else gate


def counts_text(gate: str | Gate) -> bool:
    """Whether text positions count, so that L_reg is divided by all positions: the soft gate, or a gate's attribute."""
    return gate_of(gate) is gate_soft or bool(getattr(gate, "counts_text", False))
