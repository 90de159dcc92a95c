"""All number heads except the plain one, and how the model's config selects one.

kind             config               a number is
NumberHead       default              the location of one law, Y = W_reg U' + b_reg
SeveralValues    `data.more_values`   the first of R values, each with its law (seed S4 4.7.1)
TypedNumbers     `data.number_types`  the value of the likeliest of T types (S4 4.7.2)
WithCopies       `model.copies`       one of the last K numbers of its text, or else a number of the inner kind
a custom subclass of NumberHead, named by `model.number_head`

Letters as in `heads.number_head`, and T types, K copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

    weights: Tensor  # [N,R] fp32, 0 where a number lacks this value, or [R]


class SeveralValues(NumberHead):
    """R values per number, W_reg [R,C]. Each marginal law is exact; the values are dependent."""

    def __init__(self, net: Any, config: Any) -> None:
        self.more_values = config.more_values
        super().__init__(net, config, 1 + len(self.more_values))

    def value(self, u_prime: Cauchy) -> Cauchy:
        return u_prime.affine(self.net.reg_weight[0], self.net.reg_bias[0])

    def values(self, u_prime: Cauchy) -> Cauchy:
        """Laws of all values: [...,R]."""
        return u_prime.affine(self.net.reg_weight, self.net.reg_bias)

    def decide(self, u_prime: Cauchy, memory: Tensor) -> Decision:
        more = self.values(u_prime)
        return Decision(self.value(u_prime), more=Cauchy(more.loc[..., 1:], more.scale[..., 1:]))

    def labels(self, batch: Batch, keep: Tensor, weights: Sequence[float] | None = None) -> NumberLabels:
        values, own_weights = self._every(batch, keep, weights)
        return SeveralLabels(self.target.forward(values), batch.numeric_mask.flatten()[keep], own_weights)

    def _every(self, batch: Batch, keep: Tensor, weights: Sequence[float] | None = None) -> tuple[Tensor, Tensor]:
        """All values [N,R] in the raw unit, and their weights [N,R]: 0 for a missing value."""
        factor = torch.tensor(weights or [1.0] * (1 + len(self.more_values)), device=keep.device)
        values = torch.zeros(len(keep), len(factor), dtype=torch.float64, device=keep.device)
        own = torch.zeros(values.shape, device=keep.device)
        values[:, 0], own[:, 0] = batch.numeric_labels.flatten()[keep], factor[0]
        places, which = torch.searchsorted(keep, batch.more[:, 0].long()), batch.more[:, 1].long()
        values[places, which], own[places, which] = batch.more[:, 2], factor[which]
        return values, own

    def loss(self, u_prime: Cauchy, labels: NumberLabels, stop: bool) -> tuple[Tensor, Tensor]:
        if not isinstance(labels, SeveralLabels):
            return super().loss(u_prime, labels, stop)
        nll = number_nll(self.values(u_prime).nll(labels.values), labels.weights)
        return nll, nll.new_zeros(())

    def measure(self, found: Decision, batch: Batch, at: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        assert found.more is not None
        values, there = self._every(batch, at)
        error = (self.target.inverse(found.more.loc.double()) - values[:, 1:]).abs()
        return {}, {f"error {name}": error[there[:, 1 + i] > 0, i] for i, name in enumerate(self.more_values)}

    def metrics(self, sums: Mapping[str, float], lists: Mapping[str, np.ndarray]) -> dict[str, float]:
        """eval/mdae_NAME: median absolute error of an additional value, raw unit; NaN without such values."""
        errors = {name: lists[f"error {name}"] for name in self.more_values}
        return {f"eval/mdae_{name}": float(np.median(each)) if len(each) else np.nan for name, each in errors.items()}


@dataclass(frozen=True)
class TypedLabels(NumberLabels):
    types: Tensor  # [N] int64: the type of the value, -1 for none


class TypedNumbers(NumberHead):
    """T types, W_reg [2T,C]: the value of each type, then the score S_t of each type. P_t = P(S_t > 0)."""

    def __init__(self, net: Any, config: Any) -> None:
        self.types = config.number_types
        super().__init__(net, config, 2 * len(self.types))

    def values(self, u_prime: Cauchy) -> Cauchy:
        """The law of the value for each type: [...,T]."""
        return u_prime.affine(self.net.reg_weight[: len(self.types)], self.net.reg_bias[: len(self.types)])

    def type_scores(self, u_prime: Cauchy) -> Cauchy:
        """S_t: [...,T]."""
        return u_prime.affine(self.net.reg_weight[len(self.types) :], self.net.reg_bias[len(self.types) :])

    def value(self, u_prime: Cauchy) -> Cauchy:
        """The law for the likeliest type."""
        return self._likeliest(u_prime).y

    def decide(self, u_prime: Cauchy, memory: Tensor) -> Decision:
        return self._likeliest(u_prime)

    def _likeliest(self, u_prime: Cauchy) -> Decision:
        laws, kind = self.values(u_prime), _strength(self.type_scores(u_prime)).argmax(-1)
        return Decision(Cauchy(*(part.gather(-1, kind.unsqueeze(-1))[..., 0] for part in laws)), kind=kind)

    def labels(self, batch: Batch, keep: Tensor, weights: Sequence[float] | None = None) -> NumberLabels:
        own = self.value_labels(batch, keep)
        types = own.is_number.long() - 1
        places, kind = batch.typed.unbind(1)
        types[torch.searchsorted(keep, places.contiguous())] = kind
        return TypedLabels(own.values, own.is_number, types)

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
        self.net.reg_bias[len(self.types) :] = 0.0  # of S_t: P = 1/2 for every type

    def measure(self, found: Decision, batch: Batch, at: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        labels = self.labels(batch, at)
        assert isinstance(labels, TypedLabels)
        known = labels.types >= 0
        return {"types": known.sum(), "types_right": ((found.kind == labels.types) & known).sum()}, {}

    def metrics(self, sums: Mapping[str, float], lists: Mapping[str, np.ndarray]) -> dict[str, float]:
        """eval/type_accuracy: share of numbers whose likeliest type is the true one."""
        return {"eval/type_accuracy": sums["types_right"] / max(sums["types"], 1)}


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
        self.types, self.more_values = inner.types, inner.more_values

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

    def labels(self, batch: Batch, keep: Tensor, weights: Sequence[float] | None = None) -> NumberLabels:
        return self._with_recent(self.inner.labels(batch, keep, weights), batch, keep)

    def value_labels(self, batch: Batch, keep: Tensor) -> NumberLabels:
        return self._with_recent(self.inner.value_labels(batch, keep), batch, keep)

    def _with_recent(self, own: NumberLabels, batch: Batch, keep: Tensor) -> CopyLabels:
        raw = batch.numeric_labels.flatten()[keep]
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
    """The cross entropy of each decision S > 0."""
    return -torch.where(true, scores.log_sf(0.0), scores.log_cdf(0.0))
