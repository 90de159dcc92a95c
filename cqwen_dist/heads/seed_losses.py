"""Module 5 as in the seeds (S2 section 4): losses of materialised scores [B,T,V].

For small models, and for tests of `heads.fused_loss`. Labels are already shifted.
"""

import warnings
from functools import reduce
from typing import Literal

import torch
from torch import Tensor, nn

from cqwen_dist.batch import IGNORE_INDEX
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.regression import Gate, counts_text, gate_of


class OvrClassificationLoss(nn.Module):
    """Per-position OvR loss of materialised scores (S0 5.1, S2 4.1), in the stable form."""

    class_weights: Tensor | None

    def __init__(
        self,
        vocab_size: int,
        C_ovr: float | Tensor = 0.0,
        learnable_threshold: bool = False,
        *,
        class_weights: Tensor | None = None,
    ) -> None:
        """C_ovr: a number or [vocab_size], else ValueError (S0 5.1's assert). A Parameter, such as a model's
        `action.threshold`, is shared and not copied. learnable_threshold: C learns, one C_k for each word (S3 2.5).
        class_weights [vocab_size]: factors of the words' cross entropies (S4 3.4.3)."""
        super().__init__()
        # float64 keeps a number as it is written; a loss of fp32 scores rounds it to fp32
        threshold = C_ovr if isinstance(C_ovr, Tensor) else torch.tensor(C_ovr, dtype=torch.float64)
        if threshold.numel() != 1 and threshold.shape != (vocab_size,):
            raise ValueError(f"C_ovr must be a number or of shape ({vocab_size},), found {tuple(threshold.shape)}")
        if not isinstance(threshold, nn.Parameter):
            own = threshold.expand(vocab_size) if learnable_threshold else torch.atleast_1d(threshold)
            threshold = nn.Parameter(own.detach().clone(), requires_grad=False)
        self.vocab_size = vocab_size
        self.threshold = threshold.requires_grad_(learnable_threshold or threshold.requires_grad)
        self.register_buffer("class_weights", class_weights)

    def forward(
        self, loc_S: Tensor, scale_S: Tensor, labels: Tensor, ignore_index: int = IGNORE_INDEX
    ) -> tuple[Tensor, Tensor]:
        """loc_S, scale_S [B,T,V], labels [B,T] -> loss [B,T] (0 where ignored), valid_mask [B,T] of 1 and 0.

        Both are float64 if the scores are, else fp32, as in all losses of this module.
        """
        _warn_of_another_threshold(loc_S, self.threshold)
        scores = Cauchy(*_wide(loc_S, scale_S))
        valid = labels != ignore_index
        one_hot = nn.functional.one_hot(labels.masked_fill(~valid, 0), self.vocab_size).bool()
        threshold = self.threshold.to(scores.loc.dtype)
        bce = -torch.where(one_hot, scores.log_sf(threshold), scores.log_cdf(threshold))
        if self.class_weights is not None:
            bce = bce * self.class_weights.to(bce.dtype)
        return bce.sum(-1) * valid, valid.to(bce.dtype)

    def prob_of(self, loc_S: Tensor, scale_S: Tensor, word: int) -> Tensor:
        """P of one word [B,T] from materialised scores."""
        threshold = self.threshold[word if len(self.threshold) > 1 else 0]
        scores = Cauchy(*_wide(loc_S[..., word], scale_S[..., word]))
        return scores.sf(threshold.to(scores.loc.dtype))


class RegressionLoss(nn.Module):
    """Cauchy negative log likelihood per position, without gate and mask (S0 5.2, S2 4.2)."""

    def forward(self, loc_Y: Tensor, scale_Y: Tensor, true_numeric_values: Tensor) -> Tensor:
        """[B,T] each -> [B,T], in nats; float64 if one of them is."""
        loc_Y, scale_Y, true_numeric_values = _wide(loc_Y, scale_Y, true_numeric_values)
        return Cauchy(loc_Y, scale_Y).nll(true_numeric_values)


def one_nll(nll: Tensor, value_weights: Tensor | None, p_type: Tensor | None, types: Tensor | None) -> Tensor:
    """nll [...,R] -> [...]: sum_i w_i NLL_i of R values, with weights [R] or [...,R], 0 for one that is missing (S4
    4.7.1); or P_t NLL_t of the true type t of R, 0 for type -1 (S4 4.7.2). Raises ValueError for neither and for both.
    """
    if value_weights is not None and types is None and p_type is None:
        return (nll * value_weights).sum(-1)
    if value_weights is None and types is not None and p_type is not None:
        return (p_type * nll).gather(-1, types.clamp(min=0).unsqueeze(-1))[..., 0] * (types >= 0)
    raise ValueError("several values need either value_weights, or p_type and types")


def _wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in their widest dtype, fp32 at least."""
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    return [t.to(dtype) for t in tensors]


def _warn_of_another_threshold(loc_S: Tensor, own: Tensor) -> None:
    """Warn if the scores are of a model with a different C (`ActionNetwork.forward` notes it on loc_S)."""
    models = getattr(loc_S, "threshold", own)
    if models is not own and bool((models.detach().to(own) != own.detach()).any()):
        warnings.warn(
            "The loss has a different C than the model, which generates with its C. Pass that as C_ovr, so that both "
            "have one: CausalQwenLoss(V, NUM, model.action.threshold)",
            stacklevel=2,
        )


class CausalQwenLoss(nn.Module):
    """Gate, masks and separate denominators (S0 5.3, S2 4.3).

    Two differences from S2, as in training: P_NUM enters the gate without gradient unless gate_grad is "full" (with a
    gradient and alpha = 0 the loss rewards not predicting <NUM>), and ignored positions are in neither denominator
    unless cls_denominator is "attention" (S0 5.3's, for the words). The soft gate also counts text positions and
    divides by all valid positions.

    R values per position (S4 4.7.1): loc_Y, scale_Y and numeric_values [B,T,R], with value_weights [R]. One value with
    R types (S4 4.7.2): loc_Y, scale_Y [B,T,R], and forward takes types and p_type.
    """

    def __init__(
        self,
        vocab_size: int,
        num_token_id: int,
        C_ovr: float | Tensor = 0.0,
        alpha: float = 0.0,
        reg_weight: float = 1.0,
        learnable_threshold: bool = False,
        *,
        gate: str | Gate = "alpha",
        gate_grad: str = "stop",
        value_weights: Tensor | None = None,
        class_weights: Tensor | None = None,
        cls_denominator: Literal["valid", "attention"] = "valid",
        ignore_index: int = IGNORE_INDEX,
    ) -> None:
        """C_ovr, learnable_threshold, class_weights: as `OvrClassificationLoss`."""
        super().__init__()
        self.value_weights = value_weights
        self.num_token_id, self.alpha, self.reg_weight = num_token_id, alpha, reg_weight
        self.gate, self.gate_grad = gate, gate_grad
        self.cls_denominator, self.ignore_index = cls_denominator, ignore_index
        self.ovr_loss = OvrClassificationLoss(vocab_size, C_ovr, learnable_threshold, class_weights=class_weights)
        self.reg_loss = RegressionLoss()

    def forward(
        self,
        loc_S: Tensor,
        scale_S: Tensor,
        loc_Y: Tensor,
        scale_Y: Tensor,
        labels: Tensor,
        numeric_values: Tensor,
        attention_mask: Tensor,
        *,
        types: Tensor | None = None,
        p_type: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """loc_S, scale_S [B,T,V], all others [B,T]; numeric_values: values of the labels. Returns (scalar, metrics).

        types [B,T] int64 (-1: no type): type of each label's value. p_type [B,T,R]: P of each type; its gradient
        follows gate_grad.
        """
        cls_loss, valid = self.ovr_loss(loc_S, scale_S, labels, self.ignore_index)
        real = attention_mask.bool()
        cls_mask = valid * real
        num_mask = (labels == self.num_token_id) & real
        p_num = self.ovr_loss.prob_of(loc_S, scale_S, self.num_token_id)
        if self.gate_grad == "stop":
            p_num = p_num.detach()
            p_type = None if p_type is None else p_type.detach()
        if loc_Y.ndim > numeric_values.ndim:  # one value under the law of each type
            numeric_values = numeric_values.unsqueeze(-1).expand_as(loc_Y)
        nll = self.reg_loss(loc_Y, scale_Y, numeric_values)
        if nll.ndim == 3:
            nll = one_nll(nll, self.value_weights, p_type, types)
        gated = gate_of(self.gate)(num_mask, p_num, self.alpha) * nll * cls_mask
        counted = cls_mask if self.cls_denominator == "valid" else real
        cls_mean = (cls_loss * cls_mask).sum() / counted.sum().clamp(min=1)
        reg_effective = gated.sum() / (cls_mask if counts_text(self.gate) else num_mask).sum().clamp(min=1)
        total = cls_mean + self.reg_weight * reg_effective
        return total, {
            "total_loss": float(total.detach()),
            "cls_loss_mean": float(cls_mean.detach()),
            "reg_loss_effective": float(reg_effective.detach()),
        }
