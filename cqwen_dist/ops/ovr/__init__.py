"""The one-vs-rest loss with plain tensors; inside this package they go as a `WordHead`."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.head import OvrOutput, WordHead
from cqwen_dist.ops.ovr.loss import OvrOptions, ovr_loss

__all__ = ["OvrOptions", "OvrOutput", "WordHead", "linear_ovr"]


def linear_ovr(
    loc_u: Tensor,
    scale_u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor | float,
    labels: Tensor,
    *,
    token_weights: Tensor | None = None,
    class_weights: Tensor | None = None,
    vocab_start: int = 0,
    ignore_index: int = -100,
    impl: str = "auto",
    want_prob_sum: bool = False,
    vocab_reduction: Literal["sum", "mean"] = "sum",
    vocab_size: int | None = None,
    used_rows: int | None = None,
    slope_limit: float = 0.0,
) -> OvrOutput:
    """OvR loss of the slice: sum_i token_weights_i sum_k w_k BCE_ik (S0 5.1 formulas 3-5, S4 3.4.3).

    loc_u, scale_u: [N, C], location and scale of U' (scale_u >= 0 already holds |b_noise|); weight: [v, C]. All
        three are of one dtype, fp32, bf16 or fp64: the GEMMs' dtype. With bf16 the weight may be fp32: its blocks are
        rounded one by one, and its gradient is fp32. Elementwise maths and sums are fp32 (fp64).
    bias: [v] or None. threshold: C_k, scalar or [v], or a float.
    labels: [N] int64 in the *whole* vocabulary; a label outside the slice leaves only negatives here.
        label == ignore_index takes no part: loss, per_token and gradients 0.
    token_weights: [N], the factor of each token, a constant (no gradient), for masks and global denominators.
    class_weights: [v], w_k of both terms of word k, a constant.
    vocab_reduction: "mean" divides by the number of words: vocab_size (default v; required for a slice), or used_rows
        if less.
    used_rows: words from here on in the whole vocabulary (the reserved rows) are left out of the sum.
    impl: "chunked" (torch, any device), "triton" (CUDA: one kernel between the products), "reference" (materialises
        [N, v]); "auto" is "triton" for an fp32 or bf16 weight on CUDA, else "chunked".
    want_prob_sum: also return sum_k P_ik over the slice's words in use, from the same pass.
    slope_limit: the gradient of a word's BCE with respect to its loc_S (and so to C) is cut to this, in 1/nat, before
        the weights; 0: not at all. The loss is the same (docs/decisions.md, D-slope).

    Gradients go to loc_u, scale_u, weight, bias, threshold where required, in each one's dtype.
    Raises ValueError for shapes that do not fit, labels out of range (checked on CPU only) and unknown names,
    TypeError for dtypes.
    """
    head = WordHead.of(weight, bias, threshold, vocab_start, vocab_size, used_rows)
    options = OvrOptions(class_weights, vocab_reduction, impl, ignore_index, want_prob_sum, slope_limit)
    return ovr_loss(Cauchy(loc_u, scale_u), head, labels, token_weights, options)
