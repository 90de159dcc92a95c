"""All number heads except the plain one, and how the model's config selects one.

kind             a number is
NumberHead       the location of one law, Y = W_reg U' + b_reg
WithCopies       one of the last K numbers of its text (`model.copies`), or else a number of the inner kind
SeveralValues    the first of R values, each with a law of its own (seed S4 4.7.1)
TypedNumbers     the value of the likeliest of T types (S4 4.7.2)
a custom subclass of NumberHead, named by `model.number_head`

SeveralValues and TypedNumbers are for Python: `CausalQwenConfig(more_values=R - 1)` or `(number_types=T)` selects one,
and its loss takes `SeveralLabels` or `TypedLabels`.

Letters as in `heads.number_head`, and T types, K copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cqwen_dist.batch import Batch
from cqwen_dist.config.custom import unusable
from cqwen_dist.config.errors import UserError
from cqwen_dist.heads.number_head import Decision, NumberHead, NumberLabels
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.regression import number_nll

COPY_NOISE = 0.3  # the start's ridge regression fits S_j to -1 and 1


@dataclass(frozen=True)
class SeveralLabels(NumberLabels):
    """values: [N,R]."""

    weights: Tensor  # [R] or [N,R] fp32: w_i, 0 where a number lacks this value


class SeveralValues(NumberHead):
    """R values per number, W_reg [R,C]. Each marginal law is exact; the values are dependent."""

    def __init__(self, net: Any, config: Any) -> None:
        super().__init__(net, config, 1 + config.more_values)

    def value(self, u_prime: Cauchy) -> Cauchy:
        return u_prime.affine(self.net.reg_weight[0], self.net.reg_bias[0])

    def values(self, u_prime: Cauchy) -> Cauchy:
        """Laws of all values: [...,R]."""
        return u_prime.affine(self.net.reg_weight, self.net.reg_bias)

    def loss(self, u_prime: Cauchy, labels: NumberLabels, stop: bool) -> tuple[Tensor, Tensor]:
        if not isinstance(labels, SeveralLabels):
            return super().loss(u_prime, labels, stop)
        nll = number_nll(self.values(u_prime).nll(labels.values), labels.weights)
        return nll, nll.new_zeros(())


@dataclass(frozen=True)
class TypedLabels(NumberLabels):
    types: Tensor  # [N] int64: the type of the value, -1 for none


class TypedNumbers(NumberHead):
    """T types, W_reg [2T,C]: the value of each type, then the score S_t of each type. P_t = P(S_t > 0)."""

    def __init__(self, net: Any, config: Any) -> None:
        self.count = config.number_types
        super().__init__(net, config, 2 * self.count)

    def values(self, u_prime: Cauchy) -> Cauchy:
        """The law of the value for each type: [...,T]."""
        return u_prime.affine(self.net.reg_weight[: self.count], self.net.reg_bias[: self.count])

    def type_scores(self, u_prime: Cauchy) -> Cauchy:
        """S_t: [...,T]."""
        return u_prime.affine(self.net.reg_weight[self.count :], self.net.reg_bias[self.count :])

    def value(self, u_prime: Cauchy) -> Cauchy:
        """The law for the likeliest type."""
        kind = _strength(self.type_scores(u_prime)).argmax(-1, keepdim=True)
        return Cauchy(*(part.gather(-1, kind)[..., 0] for part in self.values(u_prime)))

    def loss(self, u_prime: Cauchy, labels: NumberLabels, stop: bool) -> tuple[Tensor, Tensor]:
        """The NLL under the law of the true type times P_t, and the one-vs-rest cross entropy of all types."""
        if not isinstance(labels, TypedLabels):
            return super().loss(u_prime, labels, stop)
        nll = self.values(u_prime).nll(labels.values.unsqueeze(-1))
        scores = self.type_scores(u_prime)
        p_type, known = scores.sf(0.0), labels.is_number & (labels.types >= 0)
        true = torch.arange(nll.shape[-1], device=known.device) == labels.types.unsqueeze(-1)
        nll = number_nll(nll, None, p_type.detach() if stop else p_type, labels.types)
        return nll, torch.where(known, _one_against_the_rest(scores, true).sum(-1), 0.0).sum()

    @torch.no_grad()
    def start(self, coefficients: Tensor, intercept: float) -> None:
        super().start(coefficients, intercept)
        self.net.reg_bias[self.count :] = 0.0  # of S_t: P = 1/2 for every type


@dataclass(frozen=True)
class CopyLabels(NumberLabels):
    own: NumberLabels  # the inner head's labels
    recent: Tensor  # [N,K]: the previous numbers, NaN if there are fewer
    raw: Tensor  # [N]: the value, raw unit


class WithCopies(NumberHead):
    """Wraps a head (`inner`) and adds K scores S_j: is the number equal to the j-th last one before it?

    S_j is linear in U's word part, plus an independent Cauchy with scale |c_j|. P_j = P(S_j > 0). The likeliest number
    is copied with all digits if its P_j exceeds 1/2.
    """

    exact = True

    def __init__(self, inner: NumberHead, net: Any, config: Any) -> None:
        self.inner, self.net, self.config = inner, net, config

    def add_scores(self) -> None:
        net, count = self.net, self.config.copies
        net.copy_weight = nn.Parameter(torch.zeros(count, net.word_size))
        net.copy_bias = nn.Parameter(torch.full((count,), -1.0))  # until the start is fitted: none is likely
        net.copy_noise = nn.Parameter(torch.full((count,), COPY_NOISE))

    def value(self, u_prime: Cauchy) -> Cauchy:
        return self.inner.value(u_prime)

    def copy_scores(self, u_prime: Cauchy) -> Cauchy:
        """S_j: [...,K]."""
        scores = self.net.word_part(u_prime).affine(self.net.copy_weight, self.net.copy_bias)
        return Cauchy(scores.loc, scores.scale + self.net.copy_noise.abs())

    def decide(self, u_prime: Cauchy, memory: Tensor) -> Decision:
        own, memory = self.inner.decide(u_prime, memory), memory.to(u_prime.loc.device)
        best = _strength(self.copy_scores(u_prime)).masked_fill(memory.isnan(), -torch.inf).max(-1)
        found = memory.gather(-1, best.indices.unsqueeze(-1))[..., 0].masked_fill(best.values <= 0, torch.nan)
        loc = self.target.forward(found).where(~found.isnan(), own.y.loc)
        return own._replace(y=Cauchy(loc, own.y.scale), exact=found)

    def memory(self, is_number: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """The last K numbers up to and including each position, latest first; NaN if there are fewer."""
        count = self.config.copies
        if not values.numel():
            return values.new_zeros(*values.shape, count)
        back = torch.arange(count, device=values.device)
        number = is_number.flatten()
        before = is_number.long().cumsum(1)  # numbers of the row up to here
        begun = torch.where(positions == 0, before - is_number.long(), 0).cummax(1).values  # in earlier packed texts
        known = (before - begun).unsqueeze(-1) > back
        rank = (number.long().cumsum(0).view_as(before) - 1).unsqueeze(-1) - back
        listed = values.flatten().gather(0, number.long().argsort(descending=True, stable=True))
        return listed[rank.clamp(min=0)].masked_fill(~known, torch.nan)

    def remember(self, memory: Tensor, value: Tensor, is_number: Tensor) -> None:
        latest = torch.cat([value[:, None], memory[:, :-1]], 1)
        memory.copy_(latest.where(is_number[:, None], memory))

    def labels(self, batch: Batch, keep: Tensor) -> NumberLabels:
        own, raw = self.inner.labels(batch, keep), batch.numeric_labels.flatten()[keep]
        return CopyLabels(own.values, own.is_number, own, self.memory_at(batch, keep), raw)

    def loss(self, u_prime: Cauchy, labels: NumberLabels, stop: bool) -> tuple[Tensor, Tensor]:
        """The loss of `inner`, plus one-vs-rest cross entropies for "the label equals this earlier number"."""
        assert isinstance(labels, CopyLabels)
        known = labels.is_number.unsqueeze(-1) & ~labels.recent.isnan()
        entropy = _one_against_the_rest(self.copy_scores(u_prime), labels.recent == labels.raw.unsqueeze(-1))
        nll, others = self.inner.loss(u_prime, labels.own, stop)
        return nll, others + torch.where(known, entropy, 0.0).sum()

    def start(self, coefficients: Tensor, intercept: float) -> None:
        self.inner.start(coefficients, intercept)

    def score_targets(self, values: Tensor, memory: Tensor) -> Tensor:
        """1 if the value equals the remembered number, otherwise -1."""
        return (memory == values.unsqueeze(-1)).double() * 2 - 1

    @torch.no_grad()
    def start_scores(self, weight: Tensor, bias: Tensor) -> None:
        self.net.copy_weight.copy_(weight)
        self.net.copy_bias.copy_(bias)

    def measure(self, found: Decision, batch: Batch, at: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        assert found.exact is not None
        sums, lists = self.inner.measure(found, batch, at)
        right = (found.exact == batch.numeric_labels.flatten()[at]).sum()
        return {**sums, "copied_right": right}, lists

    def metrics(self, sums: Mapping[str, float], lists: Mapping[str, np.ndarray]) -> dict[str, float]:
        """eval/copied: fraction of numbers that are copied; eval/copy_accuracy: fraction of correct copies."""
        copied = lists["exact"]
        return {
            **self.inner.metrics(sums, lists),
            "eval/copied": copied.mean() if len(copied) else 0.0,
            "eval/copy_accuracy": sums["copied_right"] / max(copied.sum(), 1),
        }


# Config field -> the head that it selects. At most one of the fields may be set.
NUMBER_KINDS: dict[str, type[NumberHead]] = {"number_types": TypedNumbers, "more_values": SeveralValues}


def number_head_of(net: Any, config: Any, own: Callable[..., Any] | None = None) -> NumberHead:
    """The head for a model's config; its parameters go into the action network `net`. Raises `UserError`.

    own: the custom class named by `number_head`.
    """
    asked = [field for field in ("number_head", *NUMBER_KINDS) if getattr(config, field, None)]
    if len(asked) > 1:
        raise UserError(f"config.json: {' and '.join(asked)}", [getattr(config, each) for each in asked], "one of them")
    copies = getattr(config, "copies", 0)
    if own is None:
        head = NUMBER_KINDS[asked[0]](net, config) if asked else NumberHead(net, config)
        return WithCopies(head, net, config) if copies else head
    if copies:
        raise UserError("model.copies", copies, "0 with a number head of your own")
    try:
        found: NumberHead = own(net, config)
        if not callable(getattr(found, "decide", None)):
            raise TypeError("it is no NumberHead")
    except Exception as error:  # user code may raise anything
        allowed = "a subclass of cqwen_dist.heads.number_head.NumberHead (docs/training.md)"
        raise unusable("model.number_head", config.number_head, error, allowed) from error
    return found


def _strength(scores: Cauchy) -> Tensor:
    """Decision strength of S > 0, ordered like P. The clamp is for individuals without noise, whose scale is 0."""
    return scores.loc / scores.scale.clamp(min=1e-30)


def _one_against_the_rest(scores: Cauchy, true: Tensor) -> Tensor:
    return -torch.where(true, scores.log_sf(0.0), scores.log_cdf(0.0))
