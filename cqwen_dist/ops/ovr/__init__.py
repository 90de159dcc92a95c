"""The one-vs-rest loss and its decisions as users call them, with plain tensors; inside, they go as a `WordHead`."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.head import WordHead
from cqwen_dist.ops.ovr.loss import OvrOptions, OvrOutput, ovr_loss
from cqwen_dist.ops.ovr.topk import RankBy, prob_at, topk

__all__ = ["OvrOptions", "OvrOutput", "WordHead", "linear_ovr", "ovr_prob_at", "ovr_topk"]


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

    loc_u, scale_u: [N, C], location and scale of U' (scale_u >= 0 already holds |b_noise|); weight: [v, C]; all
        three of one dtype, fp32, bf16 or fp64: the GEMMs' dtype. With bf16 the weight may be fp32: then blocks of it
        are rounded as they are visited, and its gradient is fp32. Elementwise maths and sums are fp32 (fp64).
    bias: [v] or None. threshold: C_k, scalar or [v], or a float.
    labels: [N] int64 in the *whole* vocabulary; a label outside the slice leaves only negatives here.
        label == ignore_index takes no part: loss, per_token and gradients 0.
    token_weights: [N], the factor of each token, a constant (no gradient): masks and global denominators go here.
    class_weights: [v], w_k of both terms of word k, a constant.
    vocab_reduction: "mean" divides by the number of words, vocab_size (default v; required for a slice, whose own v
        is not the whole) or used_rows if less.
    used_rows: words >= used_rows of the whole vocabulary (the reserved rows) are left out of the sum.
    impl: "chunked" (torch, any device), "triton" (CUDA: one kernel between the products), "reference"
        (materialises [N, v]); "auto" is "triton" for an fp32 or bf16 weight on CUDA, else "chunked".
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


def ovr_topk(
    loc_u: Tensor,
    scale_u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor | float,
    k: int = 1,
    *,
    vocab_start: int = 0,
    used_rows: int | None = None,
    rank_by: RankBy = "ovr",
) -> tuple[Tensor, Tensor]:
    """The k best words of each token; tensors as `linear_ovr`'s. No gradient.

    rank_by "ovr" ranks by the decision strength z = (loc_S - C)/scale_S (S4 3.3.3), which orders words as P does but
    does not saturate; scale 0 gives -+inf, or 0 where loc_S = C; equal z are ordered by the larger loc_S.
    "loc" ranks by loc_S alone. used_rows: words >= used_rows of the whole vocabulary are left out.

    Returns (scores [N, k] fp32: z or loc_S, best first; ids [N, k] int64 in the whole vocabulary). A slice of
    fewer than k words fills up with score -inf, id -1. P of a z is atan2(1, -z)/pi.
    Raises ValueError for k < 1, an unknown rank_by and shapes that do not fit.
    """
    head = WordHead.of(weight, bias, threshold, vocab_start, None, used_rows)
    return topk(Cauchy(loc_u, scale_u), head, k, rank_by)


def ovr_prob_at(
    loc_u: Tensor,
    scale_u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor | float,
    word_ids: Tensor,
    *,
    vocab_start: int = 0,
) -> Tensor:
    """P of the words word_ids [m] int64 (whole vocabulary, all inside the slice) at every token: [N, m].

    fp32 (fp64 for fp64), differentiable in all five inputs. For few words, such as <NUM>.
    Raises ValueError for shapes that do not fit and, on CPU, for a word outside the slice.
    """
    return prob_at(Cauchy(loc_u, scale_u), WordHead.of(weight, bias, threshold, vocab_start), word_ids)
