"""The one-vs-rest loss with plain tensors. Inside this package the head's tensors are a `WordHead`.

Shape letters: N tokens, C causal dimensions, v words of the slice, t x n a tile of t tokens and n words.
"""

from typing import Any

from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.head import OvrOutput, TermOptions, WordHead
from cqwen_dist.ops.ovr.loss import OvrOptions, ovr_loss

__all__ = ["OvrOptions", "OvrOutput", "TermOptions", "WordHead", "linear_ovr"]


def linear_ovr(
    loc_u: Tensor,
    scale_u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor | float,
    labels: Tensor,
    *,
    token_weights: Tensor | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    used_rows: int | None = None,
    **options: Any,
) -> OvrOutput:
    """OvR loss of the slice: sum_i token_weights_i sum_k w_k BCE_ik (S0 5.1 formulas 3-5, S4 3.4.3).

    options: fields of `OvrOptions`, described here too.

    loc_u, scale_u: [N, C], location and scale of U' (scale_u >= 0 includes |b_noise|). weight: [v, C]. All three have
        one dtype, fp32, bf16 or fp64, which the GEMMs use. With bf16 the weight may be fp32: it is rounded block by
        block, and its gradient is fp32. Elementwise maths and sums are fp32 (fp64 for fp64).
    bias: [v] or None. threshold: C_k, a float, a scalar or [v].
    labels: [N] int64, ids of the *full* vocabulary. For a label outside the slice all words here are negatives.
        A token with label == ignore_index has loss, per_token and gradients 0.
    token_weights: [N], constant factor per token (no gradient), for masks and global denominators.
    class_weights: [v], constant factor w_k of both terms of word k.
    used_rows: leaves out words from this id on in the full vocabulary (reserved rows).
    impl: "chunked" (torch, any device), "triton" (CUDA: one kernel between the products), "reference" (materialises
        [N, v]); "auto" is "triton" for an fp32 or bf16 weight on CUDA, otherwise "chunked".
    want_prob_sum: also return sum_k P_ik over the words in use, from the same pass.
    terms: slope_limit clips the gradient of each BCE with respect to loc_S (and so to C), in 1/nat, before the weights;
        0: no clipping. The loss does not change (docs/decisions.md, D-slope). softmax_weight: adds this times
        -log softmax(loc_S) of the label over the words in use, once a token and without class weights
        (docs/decisions.md, D-softmax). Its gradient reaches loc_u, weight and bias.

    Gradients go to loc_u, scale_u, weight, bias and threshold if required, in the dtype of each.
    Raises ValueError for wrong shapes, labels out of range (checked on a CPU only) and unknown names, and TypeError for
    wrong dtypes.
    """
    head = WordHead.of(weight, bias, threshold, vocab_start, vocab_size, used_rows)
    return ovr_loss(Cauchy(loc_u, scale_u), head, labels, token_weights, OvrOptions(**options))
