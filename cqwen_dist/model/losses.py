"""Module 5: the losses. The seeds' three modules (S2 section 4), and `fused_loss`, which training takes.

The seeds' modules take materialised scores [B,T,V]: for small models and as the oracle. `fused_loss` computes the same
total from U without [B,T,V], over a vocabulary that may be spread over ranks. Labels are already shifted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from cqwen_dist.batch import IGNORE_INDEX
from cqwen_dist.config.custom import find_custom, unusable
from cqwen_dist.model.action import ActionNetwork
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.loss import PLAIN, OvrOptions
from cqwen_dist.ops.regression import GATES, Gate, counts_text, gate_of, number_nll
from cqwen_dist.parallel.vocab_parallel import VocabParallelOutput, vocab_parallel_loss, vocab_parallel_partial


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
        """P of one word [B,T] out of materialised scores."""
        threshold = self.threshold[word] if self.threshold.ndim else self.threshold
        return Cauchy(loc_S[..., word].float(), scale_S[..., word].float()).sf(threshold)


class RegressionLoss(nn.Module):
    """Cauchy negative log likelihood per position, no gate, no mask (S0 5.2, S2 4.2)."""

    def forward(self, loc_Y: Tensor, scale_Y: Tensor, true_numeric_values: Tensor) -> Tensor:
        """[B,T] each -> [B,T], in nats."""
        return Cauchy(loc_Y.float(), scale_Y.float()).nll(true_numeric_values.float())


class CausalQwenLoss(nn.Module):
    """Gate, masks and separate denominators (S0 5.3, S2 4.3).

    It departs from S2 twice: P_NUM enters the gate without gradient unless gate_grad is "full" (with a gradient and
    alpha = 0 the loss pays for not predicting <NUM>), and positions whose label is ignored are in neither denominator.
    The soft gate, which counts text positions too, divides by all that are valid.

    Several values a position (S4 4.7.1): loc_Y, scale_Y and numeric_values [B,T,R], with value_weights [R]. A value of
    one of several types (S4 4.7.2): loc_Y, scale_Y [B,T,R], and forward is given types and p_type.
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
        """loc_S, scale_S [B,T,V]; the rest [B,T]; numeric_values are the labels' values. -> (scalar, metrics).

        types [B,T] int64 (-1: no type), p_type [B,T,R]: the type of each label's value, and P of every type, which
        gives gradient as P_NUM does (gate_grad).
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


def gate_named(name: str, outside: str | Path = "") -> Gate:
    """A name of `GATES`, or an import path, whose class is made without arguments and tried. Raises `UserError`.

    outside: as `config.custom.find_custom`.
    """
    if name in GATES:
        return GATES[name]
    key, p_num = "loss.gate", torch.tensor([0.2, 0.9, 0.5])
    found = find_custom(key, name, outside)
    try:
        gate: Gate = found() if isinstance(found, type) else found
        factor = gate(torch.tensor([True, False, True]), p_num, 0.0)
        if factor.shape != p_num.shape or factor.dtype != p_num.dtype:
            raise ValueError(f"it gave {factor.dtype} {list(factor.shape)} for P(<NUM>) torch.float32 [3]")
    except Exception as error:  # whatever the user's class does
        raise unusable(key, name, error, "a gate (num_mask [N], p_num [N], alpha) -> [N]: docs/training.md") from error
    return gate


@dataclass(frozen=True)
class TokenLabels:
    """What N positions learn. Several values a position, or a value of a type (S4 4.7), where the head has them."""

    words: Tensor  # [N] int64, in the whole vocabulary
    values: Tensor  # [N], with value_weights [N,R], fp32: the labels' values in the target unit, 0's where text
    is_number: Tensor  # [N] bool: positions whose value is learnt
    value_weights: Tensor | None = None  # [R] or [N,R]
    types: Tensor | None = None  # [N] int64: the type of the value, -1 for none
    recent: Tensor | None = None  # [N,K]: what each value may be a copy of, NaN where there are fewer
    raw: Tensor | None = None  # [N]: the values in the raw unit, with `recent`
    partial: Tensor | None = None  # [M,2] int64: a place among the N with word IGNORE_INDEX; w, or ~w for "not w"
    partial_counts: list[int] | None = None  # M of every rank of the vocabulary group


@dataclass(frozen=True)
class LossOptions:
    """The loss of a run: the gate of the numbers, and how the words' part is computed."""

    num_token_id: int
    alpha: float = 0.0
    gate: str | Gate = "alpha"  # a name of `GATES`, or one of the user's own
    gate_grad: str = "stop"  # "full": the gate's probabilities give gradient
    gemm_dtype: torch.dtype = torch.float32  # of the products, and of tokens in communication; the rows stay fp32
    used_rows: int | None = None  # words from here on are left out of the loss
    ovr: OvrOptions = PLAIN


@dataclass(frozen=True)
class LossTerms:
    """What one micro-batch contributes: the scalar to differentiate, and sums (no means) of this rank's tokens."""

    loss: Tensor  # scalar: of the whole vocabulary group's words plus this rank's numbers, weighted
    cls_sum: Tensor  # [] detached, unweighted
    reg_sum: Tensor  # [] detached, gated, unweighted
    prob_sum: Tensor  # [N] detached: sum of P over the vocabulary
    p_num: Tensor  # [N] detached


def fused_loss(
    action: ActionNetwork,
    u: Cauchy,
    labels: TokenLabels,
    options: LossOptions,
    token_weight: float,
    number_weight: float,
    group: ProcessGroup | None = None,
    token_counts: list[int] | None = None,
) -> LossTerms:
    """The loss of N label positions (S0 5.3), no [N,V] ever formed.

    u: U [N,C] of this rank's tokens; N may be 0. token_weight, number_weight: reciprocals of the global counts, times
    whatever the engine divides by. group: the vocabulary group, None where this rank holds the whole vocabulary.
    token_counts: N of every rank of the group, where they are known. Collective over `group`, forward and backward.
    Raises as `linear_ovr` and `number_nll`.
    """
    u_prime = action.add_noise(u)
    out = vocab_parallel_loss(
        action.word_part(u_prime).to(options.gemm_dtype),
        action.word_head(options.used_rows),
        labels.words,
        torch.full(labels.words.shape, token_weight, device=labels.words.device),
        options.ovr,
        group,
        options.num_token_id,
        token_counts,
    )
    assert out.p_num is not None
    words, cls_sum = _with_partial(action, u_prime, labels, options, token_weight, group, out)
    stop = options.gate_grad == "stop"
    p_num = out.p_num.detach() if stop else out.p_num
    nll, type_loss = _number_losses(action, u_prime, labels, stop)
    gates = gate_of(options.gate)(labels.is_number, p_num, options.alpha)
    reg_sum = (gates * nll).sum()  # without a number it is 0 and still in the graph
    return LossTerms(
        loss=words + token_weight * type_loss + number_weight * reg_sum,
        cls_sum=cls_sum + type_loss.detach(),
        reg_sum=reg_sum.detach(),
        prob_sum=out.prob_sum,
        p_num=out.p_num.detach(),
    )


def _number_losses(action: ActionNetwork, u_prime: Cauchy, labels: TokenLabels, stop: bool) -> tuple[Tensor, Tensor]:
    """(NLL [N], loss of the types []), by `number_nll`.

    The NLL is finite everywhere, so a gate of 0 drops value and gradient. A type is one more word of the position: the
    cross entropies of all types, one against the rest, belong to L_cls. So do those of copies. stop: P_t gates without
    gradient.
    """
    copies = _copy_loss(action, u_prime, labels)
    if labels.types is None:
        y = action.value(u_prime) if labels.value_weights is None else action.values(u_prime)
        return number_nll(y.nll(labels.values), labels.value_weights), copies
    y = action.values(u_prime)
    nll = y.nll(labels.values.unsqueeze(-1))
    scores = action.type_scores(u_prime)
    p_type, known = scores.sf(0.0), labels.is_number & (labels.types >= 0)
    true = torch.arange(y.loc.shape[-1], device=known.device) == labels.types.unsqueeze(-1)
    bce = -torch.where(true, scores.log_sf(0.0), scores.log_cdf(0.0)).sum(-1)
    nll = number_nll(nll, None, p_type.detach() if stop else p_type, labels.types)
    return nll, torch.where(known, bce, 0.0).sum() + copies


def _copy_loss(action: ActionNetwork, u_prime: Cauchy, labels: TokenLabels) -> Tensor:
    """[]: the cross entropies of the numbers before each, one against the rest: whether the label equals it."""
    if labels.recent is None or labels.raw is None or not action.copies:
        return u_prime.loc.new_zeros(())
    scores, known = action.copy_scores(u_prime), labels.is_number.unsqueeze(-1) & ~labels.recent.isnan()
    bce = -torch.where(labels.recent == labels.raw.unsqueeze(-1), scores.log_sf(0.0), scores.log_cdf(0.0))
    return torch.where(known, bce, 0.0).sum()


def _with_partial(
    action: ActionNetwork,
    u_prime: Cauchy,
    labels: TokenLabels,
    options: LossOptions,
    token_weight: float,
    group: ProcessGroup | None,
    out: VocabParallelOutput,
) -> tuple[Tensor, Tensor]:
    """The words' loss and sum of `out`, plus those of partial labels where any rank of the group has some."""
    if labels.partial is None or not any(counts := labels.partial_counts or [len(labels.partial)]):
        return out.loss, out.per_token.sum()
    place, words = labels.partial.unbind(1)
    seen = action.word_part(u_prime)
    loss, own = vocab_parallel_partial(
        Cauchy(seen.loc[place], seen.scale[place]),
        action.word_head(options.used_rows),
        words,
        token_weight,
        options.ovr,
        group,
        counts,
    )
    return out.loss + loss, out.per_token.sum() + own
