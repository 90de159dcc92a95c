"""Module 5 as in the seeds (S2 section 4): losses of materialised scores [B,T,V].

For small models, and for tests of `heads.fused_loss`. Labels are already shifted.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cqwen_dist.batch import IGNORE_INDEX
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.regression import Gate, counts_text, gate_of, number_nll


class OvrClassificationLoss(nn.Module):
    """Per-position OvR loss of materialised scores (S0 5.1, S2 4.1), in the stable form."""

    def __init__(
        self,
        vocab_size: int,
        C_ovr: float | Tensor = 0.0,
        learnable_threshold: bool = False,
        *,
        per_word: bool = False,
    ) -> None:
        """C_ovr: a number or [vocab_size], else ValueError (S0 5.1's assert). per_word: make a number [vocab_size]."""
        super().__init__()
        threshold = torch.as_tensor(C_ovr, dtype=torch.float32)
        if threshold.ndim and threshold.shape != (vocab_size,):
            raise ValueError(f"C_ovr must be a number or of shape ({vocab_size},), found {tuple(threshold.shape)}")
        if per_word:
            threshold = threshold.expand(vocab_size)
        self.vocab_size = vocab_size
        self.threshold = nn.Parameter(threshold.clone(), requires_grad=learnable_threshold)

    def forward(
        self, loc_S: Tensor, scale_S: Tensor, labels: Tensor, ignore_index: int = IGNORE_INDEX
    ) -> tuple[Tensor, Tensor]:
        """loc_S, scale_S [B,T,V], labels [B,T] -> loss [B,T] (0 where ignored), valid_mask [B,T] bool."""
        valid = labels != ignore_index
        scores = Cauchy(loc_S.float(), scale_S.float())
        one_hot = nn.functional.one_hot(labels.masked_fill(~valid, 0), self.vocab_size).bool()
        bce = -torch.where(one_hot, scores.log_sf(self.threshold), scores.log_cdf(self.threshold))
        return bce.sum(-1) * valid, valid

    def prob_of(self, loc_S: Tensor, scale_S: Tensor, word: int) -> Tensor:
        """P of one word [B,T] from materialised scores."""
        threshold = self.threshold[word] if self.threshold.ndim else self.threshold
        return Cauchy(loc_S[..., word].float(), scale_S[..., word].float()).sf(threshold)


class RegressionLoss(nn.Module):
    """Cauchy negative log likelihood per position, without gate and mask (S0 5.2, S2 4.2)."""

    def forward(self, loc_Y: Tensor, scale_Y: Tensor, true_numeric_values: Tensor) -> Tensor:
        """[B,T] each -> [B,T], in nats."""
        return Cauchy(loc_Y.float(), scale_Y.float()).nll(true_numeric_values.float())


class CausalQwenLoss(nn.Module):
    """Gate, masks and separate denominators (S0 5.3, S2 4.3).

    Two differences from S2: P_NUM enters the gate without gradient unless gate_grad is "full" (with a gradient and
    alpha = 0 the loss rewards not predicting <NUM>), and ignored positions are in neither denominator. The soft gate
    also counts text positions and divides by all valid positions.

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
        per_word_threshold: bool = False,
        gate: str | Gate = "alpha",
        gate_grad: str = "stop",
        value_weights: Tensor | None = None,
    ) -> None:
        """per_word_threshold: C is [vocab_size] where C_ovr is a number; with learnable_threshold each C_k learns."""
        super().__init__()
        self.value_weights = value_weights
        self.num_token_id, self.alpha, self.reg_weight = num_token_id, alpha, reg_weight
        self.gate, self.gate_grad = gate, gate_grad
        self.ovr_loss = OvrClassificationLoss(vocab_size, C_ovr, learnable_threshold, per_word=per_word_threshold)
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
        cls_loss, valid = self.ovr_loss(loc_S, scale_S, labels)
        cls_mask = valid & attention_mask.bool()
        num_mask = (labels == self.num_token_id) & attention_mask.bool()
        p_num = self.ovr_loss.prob_of(loc_S, scale_S, self.num_token_id)
        if self.gate_grad == "stop":
            p_num = p_num.detach()
            p_type = None if p_type is None else p_type.detach()
        if loc_Y.ndim > numeric_values.ndim:  # one value under the law of each type
            numeric_values = numeric_values.unsqueeze(-1).expand_as(loc_Y)
        nll = self.reg_loss(loc_Y, scale_Y, numeric_values)
        if nll.ndim == 3:
            nll = number_nll(nll, self.value_weights, p_type, types)
        gated = gate_of(self.gate)(num_mask, p_num, self.alpha) * nll * cls_mask
        cls_mean = (cls_loss * cls_mask).sum() / cls_mask.sum().clamp(min=1)
        reg_effective = gated.sum() / (cls_mask if counts_text(self.gate) else num_mask).sum().clamp(min=1)
        total = cls_mean + self.reg_weight * reg_effective
        return total, {
            "total_loss": float(total.detach()),
            "cls_loss_mean": float(cls_mean.detach()),
            "reg_loss_effective": float(reg_effective.detach()),
        }
