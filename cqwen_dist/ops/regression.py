"""Gates of the regression loss: the loss of a position is gate_i * NLL_i. The caller applies masks and denominators."""

from collections.abc import Callable

from torch import Tensor

Gate = Callable[[Tensor, Tensor, float], Tensor]


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
