"""All number heads except the plain one, and how the model's config selects one.

kind             a number is
NumberHead       the location of one law, Y = W_reg U' + b_reg
WithCandidates   an exact value that the text gives (`heads.candidates`), or else a number of the inner kind
SeveralValues    the first of R values, each with a law of its own (seed S4 4.7.1)
TypedNumbers     the value of the likeliest of T types (S4 4.7.2)
a custom subclass of NumberHead, named by `model.number_head`

SeveralValues and TypedNumbers are for Python: `CausalQwenConfig(more_values=R - 1)` or `(number_types=T)` selects one,
and its loss takes `SeveralLabels` or `TypedLabels`.

Letters as in `heads.number_head`, and T types.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.config.custom import unusable
from cqwen_dist.config.errors import UserError
from cqwen_dist.config.shape import NONE
from cqwen_dist.heads.candidates import WithCandidates
from cqwen_dist.heads.number_head import NumberHead, NumberLabels, decision_strength, one_against_the_rest
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.regression import number_nll


@dataclass(frozen=True)
class SeveralLabels(NumberLabels):
    """values: [N,R]."""

    weights: Tensor  # [R] or [N,R] fp32: w_i, 0 where a number lacks this value


class SeveralValues(NumberHead):
    """R values per number, W_reg [R,C]. Each marginal law is exact; the values are dependent."""

    def __init__(self, net: Any, config: Any) -> None:
        super().__init__(net, config, 1 + config.more_values)

    def value(self, u_prime: Cauchy) -> Cauchy:
        return self.kind(*u_prime.affine(self.net.reg_weight[0], self.net.reg_bias[0]))

    def values(self, u_prime: Cauchy) -> Cauchy:
        """Laws of all values: [...,R]."""
        return self.kind(*u_prime.affine(self.net.reg_weight, self.net.reg_bias))

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
        return self.kind(*u_prime.affine(self.net.reg_weight[: self.count], self.net.reg_bias[: self.count]))

    def type_scores(self, u_prime: Cauchy) -> Cauchy:
        """S_t: [...,T]."""
        return u_prime.affine(self.net.reg_weight[self.count :], self.net.reg_bias[self.count :])

    def value(self, u_prime: Cauchy) -> Cauchy:
        """The law for the likeliest type."""
        kind = decision_strength(self.type_scores(u_prime)).argmax(-1, keepdim=True)
        return self.kind(*(part.gather(-1, kind)[..., 0] for part in self.values(u_prime)))

    def loss(self, u_prime: Cauchy, labels: NumberLabels, stop: bool) -> tuple[Tensor, Tensor]:
        """The NLL under the law of the true type times P_t, and the one-vs-rest cross entropy of all types."""
        if not isinstance(labels, TypedLabels):
            return super().loss(u_prime, labels, stop)
        nll = self.values(u_prime).nll(labels.values.unsqueeze(-1))
        scores = self.type_scores(u_prime)
        p_type, known = scores.sf(0.0), labels.is_number & (labels.types >= 0)
        true = torch.arange(nll.shape[-1], device=known.device) == labels.types.unsqueeze(-1)
        nll = number_nll(nll, None, p_type.detach() if stop else p_type, labels.types)
        return nll, torch.where(known, one_against_the_rest(scores, true).sum(-1), 0.0).sum()

    @torch.no_grad()
    def start(self, coefficients: Tensor, intercept: float) -> None:
        super().start(coefficients, intercept)
        self.net.reg_bias[self.count :] = 0.0  # of S_t: P = 1/2 for every type


# Config field -> the head that it selects. At most one of the fields may be set.
NUMBER_KINDS: dict[str, type[NumberHead]] = {"number_types": TypedNumbers, "more_values": SeveralValues}


def number_head_of(net: Any, config: Any, own: Callable[..., Any] | None = None) -> NumberHead:
    """The head for a model's config; its parameters go into the action network `net`. Raises `UserError`.

    own: the custom class named by `number_head`.
    """
    asked = [field for field in ("number_head", *NUMBER_KINDS) if getattr(config, field, None)]
    if len(asked) > 1:
        raise UserError(f"config.json: {' and '.join(asked)}", [getattr(config, each) for each in asked], "one of them")
    candidates = getattr(config, "candidates", NONE)
    if own is None:
        head = NUMBER_KINDS[asked[0]](net, config) if asked else NumberHead(net, config)
        return head if candidates == NONE else WithCandidates(head, net, config)
    if candidates != NONE:
        raise UserError("model.candidates", candidates, "none with a number head of your own")
    try:
        found: NumberHead = own(net, config)
        if not callable(getattr(found, "decide", None)):
            raise TypeError("it is no NumberHead")
    except Exception as error:  # user code may raise anything
        allowed = "a subclass of cqwen_dist.heads.number_head.NumberHead (docs/training.md)"
        raise unusable("model.number_head", config.number_head, error, allowed) from error
    return found
