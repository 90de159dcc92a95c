"""The one door to the one-vs-rest loss and its inference heads, for a slice [vocab_start, vocab_start + v) of words.

Score of word k at token i: S_ik ~ Cauchy(loc_u_i . W_k + b_k, scale_u_i . |W_k|) (S0 4), and
P_ik = P(S_ik > C_k) (S0 5.1). The loss of a token is the sum over words of the binary cross entropy of P_ik
(S3 2.5.1). A sum has no normaliser: slices of the vocabulary add up exactly, whichever rank holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.ovr_chunked import ovr_chunked
from cqwen_dist.ops.ovr_heads import ovr_prob_at, ovr_prob_sum, ovr_topk
from cqwen_dist.ops.ovr_inputs import OvrInputs, OvrSums, check_head, check_labels, rows_in_use
from cqwen_dist.ops.ovr_reference import ovr_reference
from cqwen_dist.ops.ovr_sampling import NegativeSampling, sample_negatives

__all__ = ["NegativeSampling", "OvrOutput", "linear_ovr", "ovr_prob_at", "ovr_prob_sum", "ovr_topk"]


def _triton(inputs: OvrInputs) -> OvrSums:
    from cqwen_dist.ops.ovr_triton import ovr_triton  # triton comes with torch's CUDA builds only

    return ovr_triton(inputs)


IMPLEMENTATIONS: dict[str, Callable[[OvrInputs], OvrSums]] = {
    "reference": ovr_reference,
    "chunked": ovr_chunked,
    "triton": _triton,
}


def _fastest(inputs: OvrInputs) -> str:
    """On an H200 the kernel takes a quarter to a half of the torch operations' time; it is fp32 only."""
    return "triton" if inputs.weight.is_cuda and inputs.real == torch.float32 and _has_triton() else "chunked"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


class OvrOutput(NamedTuple):
    """loss: scalar, differentiable. per_token [N]: each token's sum over the slice, its token weight not in it, 0 where
    ignored. prob_sum [N]: sum of P over the slice, or None. All fp32 (fp64 for fp64), the last two detached."""

    loss: Tensor
    per_token: Tensor
    prob_sum: Tensor | None


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
    sampling: NegativeSampling | None = None,
) -> OvrOutput:
    """OvR loss of the slice: sum_i token_weights_i sum_k w_k BCE_ik (S0 5.1 formulas 3-5, S4 3.4.3).

    loc_u, scale_u: [N, C], location and scale of U' (scale_u >= 0 already holds |b_noise|); weight: [v, C]; all
        three of one dtype, fp32, bf16 or fp64: the GEMMs' dtype. With bf16 the weight may be fp32: then blocks of it
        are rounded as they are visited, and its gradient is fp32. Elementwise maths and sums are fp32 (fp64).
    bias: [v] or None. threshold: C_k, scalar or [v], or a float.
    labels: [N] int64 in the *whole* vocabulary; a label outside the slice leaves only negatives here.
        label == ignore_index takes no part: loss, per_token and gradients 0.
    token_weights: [N], the factor of each token, a constant (no gradient): masks and global denominators go here.
    class_weights: [v], w_k of both terms of word k, a constant.
    vocab_reduction: "mean" divides by the number of words, ``vocab_size`` (default v; required for a slice, whose
        own v is not the whole) or ``used_rows`` if less.
    used_rows: words >= used_rows of the whole vocabulary (the reserved rows) are left out of the sum.
    impl: "chunked" (torch, any device), "triton" (CUDA: one kernel between the products), "reference"
        (materialises [N, v]); "auto" is "chunked".
    want_prob_sum: also return sum_k P_ik over the slice's words in use, from the same visit.
    sampling: draw the negatives; loss, per_token and gradients become unbiased estimates (``ovr_sampling``).

    Gradients go to loc_u, scale_u, weight, bias, threshold where required, in each one's dtype.
    Raises ValueError for shapes that do not fit, labels out of range (looked at on CPU only: on a GPU it would
    stop the stream, and the collator answers for it) and unknown names, TypeError for dtypes.
    """
    threshold = check_head(loc_u, scale_u, weight, bias, threshold)
    n, v = loc_u.shape[0], weight.shape[0]
    if labels.shape != (n,) or labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64 of shape ({n},), found {labels.dtype} {tuple(labels.shape)}")
    for name, tensor, size in (("token_weights", token_weights, n), ("class_weights", class_weights, v)):
        if tensor is not None and tensor.shape != (size,):
            raise ValueError(f"{name} must have shape ({size},), found {tuple(tensor.shape)}")
    if vocab_reduction not in ("sum", "mean"):
        raise ValueError(f"vocab_reduction must be 'sum' or 'mean', found {vocab_reduction!r}")
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be 'auto' or one of {sorted(IMPLEMENTATIONS)}, found {impl!r}")
    limit = min((x for x in (vocab_size, used_rows) if x is not None), default=None)
    if labels.device.type == "cpu":
        check_labels(labels, ignore_index, limit)

    factor = 1.0 if vocab_reduction == "sum" else 1.0 / (v if limit is None else limit)
    rows = rows_in_use(v, vocab_start, used_rows)
    valid = labels != ignore_index
    real = torch.promote_types(weight.dtype, torch.float32)
    weights = loc_u.new_ones(n, dtype=real) if token_weights is None else token_weights.detach().to(real)
    inside = valid & (labels >= vocab_start) & (labels < vocab_start + rows)
    inputs = OvrInputs(
        loc_u,
        scale_u,
        weight,
        bias,
        threshold,
        torch.where(inside, labels - vocab_start, -1),
        torch.where(valid, weights * factor, 0.0),
        None if class_weights is None else class_weights.detach(),
        rows,
        want_prob_sum,
    )
    if sampling is not None:
        inputs = sample_negatives(inputs, sampling, vocab_start)
    with torch.autocast(loc_u.device.type, enabled=False):
        loss, per_token, prob_sum = IMPLEMENTATIONS[_fastest(inputs) if impl == "auto" else impl](inputs)
    return OvrOutput(loss, torch.where(valid, per_token * factor, 0.0), prob_sum)
