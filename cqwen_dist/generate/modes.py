"""The ways to decide the next word and number, each a pair of small functions.

    law(action, U, draws)        -> U', what the action network is given: which randomness is drawn, which stays a law
    choose(action, U', options)  -> the word of each row (of what words see of U'); the number is Y(U')'s location

    mode        law of U'                                  word
    standard    Cauchy(loc, scale + |b|)                   argmax P                        S3 3.1
    compatible  the same                                   softmax(loc_S) over all of V    S3 3.3
    ovr         the same                                   drawn from P / sum P            S3 3.3, last paragraph
    causal      Cauchy(u, |b|), u drawn at every step      argmax P                        S3 3.2
    individual  Cauchy(u, |b|), u from one eps_seed        argmax P                        S3 3.4.1
    noise       Cauchy(loc + |b| eps, scale), one eps      argmax P                        S3 3.4.2
    sample      the point u, drawn at every step           argmax S(u)                     S4 2.4.2

b is b_noise. What is drawn is drawn at `temperature` times its scale (1: as inferred; 0: the location itself), in
compatible the logits are divided by it. Letters: B rows, C causal dimension, V vocabulary. Everything is of one
position: [B,C], at most [B,V].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers.generation import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cqwen_dist.config import UserError
from cqwen_dist.ops.cauchy import Cauchy, prob_above
from cqwen_dist.ops.ovr.best import RowSizes, best_word, scale_scores
from cqwen_dist.ops.ovr.head import WordHead
from cqwen_dist.ops.products import product


class Action(Protocol):
    """What is used of `model.action.ActionNetwork`: the whole vocabulary's rows on this device."""

    vocab_size: int
    vocab_start: int
    cls_weight: Tensor  # [V,C] without the number dimensions
    cls_bias: Tensor  # [V]
    b_noise: Tensor  # [C]
    reg_weight: Tensor  # [C], or of several values or types [R,C]
    types: int | None

    def add_noise(self, u: Cauchy) -> Cauchy: ...

    def word_part(self, u: Cauchy) -> Cauchy: ...

    def word_head(self, used_rows: int | None = None) -> WordHead: ...

    def value(self, u_prime: Cauchy) -> Cauchy: ...

    def values(self, u_prime: Cauchy) -> Cauchy: ...

    def number_type(self, u_prime: Cauchy) -> Tensor: ...


@dataclass
class Draws:
    """The randomness of one generation: fresh uniforms, and one instance that is kept from its first use on."""

    generator: torch.Generator | None = None
    temperature: float = 1.0  # factor on the scale that is drawn from
    eps_truncation: float = 0.0  # uniforms are kept so far from 0 and 1: a Cauchy's far tails are not drawn
    _kept: Tensor | None = field(default=None, repr=False)

    def fresh(self, like: Tensor) -> Tensor:
        """Uniforms in [0,1) of like's shape, from the generator (on its own device), or torch's global state."""
        device = like.device if self.generator is None else self.generator.device
        return torch.rand(like.shape, generator=self.generator, device=device).to(like.device)

    def kept(self, like: Tensor) -> Tensor:
        """The same uniforms at every call: each row's own, drawn at the first."""
        if self._kept is None:
            self._kept = self.fresh(like)
        return self._kept

    def from_law(self, law: Cauchy, uniforms: Tensor) -> Tensor:
        """loc + temperature scale tan(pi (eps - 1/2)), [B,C]."""
        eps = uniforms.clamp(self.eps_truncation, 1.0 - self.eps_truncation)
        return Cauchy(law.loc, law.scale * self.temperature).sample(eps)

    def pick(self, weights: Tensor) -> Tensor:
        """One index a row [B], with probability in proportion to weights [B,n] (>= 0, not all 0)."""
        device = weights.device if self.generator is None else self.generator.device
        return torch.multinomial(weights.to(device), 1, generator=self.generator)[:, 0].to(weights.device)


@dataclass(frozen=True)
class Options:
    """What a choice may depend on beside U'.

    used_rows: words >= used_rows are never chosen (not in `compatible`). sizes: of W_cls's rows, which make
    ranking by P quick (none: every scale is computed).
    do_sample, processors: of `compatible`; processors are Hugging Face's, (ids [B,t], logits [B,V]) -> logits.
    """

    used_rows: int
    rank_by: Literal["ovr", "loc"] = "ovr"
    do_sample: bool = True
    processors: Callable[[Tensor, Tensor], Tensor] | None = None
    sizes: RowSizes | None = None


Law = Callable[[Action, Cauchy, Draws], Cauchy]
Choose = Callable[[Action, Cauchy, Draws, Options, Tensor], Tensor]


def with_noise(action: Action, u: Cauchy, draws: Draws) -> Cauchy:
    """Nothing drawn: Cauchy(loc, scale + |b|)."""
    return action.add_noise(u)


def individual_each_step(action: Action, u: Cauchy, draws: Draws) -> Cauchy:
    """An individual drawn, the noise still a law: Cauchy(u, |b|)."""
    return _at(action, draws.from_law(u, draws.fresh(u.loc)))


def one_individual(action: Action, u: Cauchy, draws: Draws) -> Cauchy:
    """The individual at the same quantiles eps_seed in [0,1)^C of U at every step: Cauchy(u, |b|)."""
    return _at(action, draws.from_law(u, draws.kept(u.loc)))


def one_noise(action: Action, u: Cauchy, draws: Draws) -> Cauchy:
    """The same draw of the noise at every step: Cauchy(loc + |b| eps, scale)."""
    noise = Cauchy(torch.zeros_like(u.loc), action.b_noise.abs().expand_as(u.loc))
    return Cauchy(u.loc + draws.from_law(noise, draws.kept(u.loc)), u.scale)


def point(action: Action, u: Cauchy, draws: Draws) -> Cauchy:
    """An individual drawn and no noise: all of U' at u."""
    return Cauchy(draws.from_law(u, draws.fresh(u.loc)), torch.zeros_like(u.scale))


def best(action: Action, u_prime: Cauchy, draws: Draws, options: Options, ids: Tensor) -> Tensor:
    """argmax P, equal P told apart by loc_S (or argmax loc_S): [B]."""
    u, head = u_prime.to(action.cls_weight.dtype), action.word_head(options.used_rows)
    if options.rank_by == "loc":
        return (product(u.loc, head.weight[: head.rows]) + action.cls_bias[: head.rows]).argmax(1)
    return best_word(u, head, options.sizes)


def softmax_sample(action: Action, u_prime: Cauchy, draws: Draws, options: Options, ids: Tensor) -> Tensor:
    """As an ordinary language model, softmax(loc_S) after the processors; the best word without sampling: [B]."""
    logits = (u_prime.loc.to(action.cls_weight.dtype) @ action.cls_weight.T + action.cls_bias).float()
    if options.processors is not None:
        logits = options.processors(ids, logits)
    return draws.pick(logits.softmax(-1)) if options.do_sample else logits.argmax(-1)


def ovr_sample(action: Action, u_prime: Cauchy, draws: Draws, options: Options, ids: Tensor) -> Tensor:
    """One of the words in use with probability P / sum P; argmax where every P is 0: [B]."""
    p = prob_words(action, u_prime, options.used_rows)
    none = p.sum(-1) == 0
    if not none.any():
        return draws.pick(p)
    return torch.where(none, best(action, u_prime, draws, options, ids), draws.pick(p + none[:, None]))


def prob_words(action: Action, u_prime: Cauchy, used_rows: int, threshold: float | None = None) -> Tensor:
    """P of every word in use [B,used_rows], fp32. threshold: instead of the model's own C."""
    u, head = u_prime.to(action.cls_weight.dtype), action.word_head(used_rows)
    used = head.take(slice(0, head.rows))
    loc_s = product(u.loc, used.weight) + action.cls_bias[: head.rows]
    c = used.threshold if threshold is None else threshold
    return prob_above(scale_scores(u.scale, used.weight, head.rows), c - loc_s)


def warpers(temperature: float, top_k: int, top_p: float) -> LogitsProcessorList:
    """Hugging Face's own, in its order; top_k 0 and top_p 1 leave all words."""
    chosen: list[Any] = []
    if temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(temperature))
    if top_k:
        chosen.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chosen.append(TopPLogitsWarper(top_p))
    return LogitsProcessorList(chosen)


@dataclass(frozen=True)
class Mode:
    """A law, a choice, and how `best` ranks unless the caller says."""

    law: Law
    choose: Choose
    rank_by: Literal["ovr", "loc"] = "ovr"

    @property
    def has_logits(self) -> bool:
        """Whether the word is of softmax(loc_S), which top-k and top-p cut."""
        return self.choose is softmax_sample

    @property
    def has_temperature(self) -> bool:
        """Whether a temperature changes anything: there are logits, or an individual or the noise is drawn."""
        return self.has_logits or self.law is not with_noise

    def ranks(self, rule: str | None) -> bool:
        """Whether words are ranked by P."""
        return self.choose is best and (rule or self.rank_by) == "ovr"


MODES: dict[str, Mode] = {
    "standard": Mode(with_noise, best),
    "causal": Mode(individual_each_step, best),
    "compatible": Mode(with_noise, softmax_sample),
    "ovr": Mode(with_noise, ovr_sample),
    "individual": Mode(one_individual, best),
    "noise": Mode(one_noise, best),
    "sample": Mode(point, best, rank_by="loc"),
}


def find_mode(name: str) -> Mode:
    """The mode of a name. Raises `UserError`, which lists them."""
    if name not in MODES:
        raise UserError("mode", name, ", ".join(MODES))
    return MODES[name]


def _at(action: Action, u: Tensor) -> Cauchy:
    return Cauchy(u, action.b_noise.abs().expand_as(u))
