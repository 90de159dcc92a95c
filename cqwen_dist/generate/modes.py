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

b is b_noise. Letters: B rows, C causal dimension, V vocabulary. Everything is of one position: [B,C], at most [B,V].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from cqwen_dist.config import UserError
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import ovr_prob_at, ovr_topk

CHUNK_BYTES = 64 << 20  # of W_cls's rows looked at together where every P is wanted


class Action(Protocol):
    """What is used of `model.action.ActionNetwork`: the whole vocabulary's rows on this device."""

    vocab_size: int
    vocab_start: int
    cls_weight: Tensor  # [V,C] without the number dimensions
    cls_bias: Tensor  # [V]
    threshold: Tensor  # [] or [V]
    b_noise: Tensor  # [C]

    def add_noise(self, u: Cauchy) -> Cauchy: ...

    def word_part(self, u: Cauchy) -> Cauchy: ...

    def value(self, u_prime: Cauchy) -> Cauchy: ...


@dataclass
class Draws:
    """The randomness of one generation: fresh uniforms, and one instance that is kept from its first use on."""

    generator: torch.Generator | None = None
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

    def pick(self, weights: Tensor) -> Tensor:
        """One index a row [B], with probability in proportion to weights [B,n] (>= 0, not all 0)."""
        device = weights.device if self.generator is None else self.generator.device
        return torch.multinomial(weights.to(device), 1, generator=self.generator)[:, 0].to(weights.device)


@dataclass(frozen=True)
class Options:
    """What a choice may depend on beside U'. used_rows: words >= used_rows are never chosen (not in `compatible`)."""

    used_rows: int
    rank_by: Literal["ovr", "loc"] = "ovr"
    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


Law = Callable[[Action, Cauchy, Draws], Cauchy]
Choose = Callable[[Action, Cauchy, Draws, Options], Tensor]


def with_noise(action: Action, u: Cauchy, draws: Draws) -> Cauchy:
    """Nothing drawn: Cauchy(loc, scale + |b|)."""
    return action.add_noise(u)


def individual_each_step(action: Action, u: Cauchy, draws: Draws) -> Cauchy:
    """An individual drawn, the noise still a law: Cauchy(u, |b|)."""
    return _at(action, u.sample(draws.fresh(u.loc)))


def one_individual(action: Action, u: Cauchy, draws: Draws) -> Cauchy:
    """The individual at the same quantiles eps_seed in [0,1)^C of U at every step: Cauchy(u, |b|)."""
    return _at(action, u.sample(draws.kept(u.loc)))


def one_noise(action: Action, u: Cauchy, draws: Draws) -> Cauchy:
    """The same draw of the noise at every step: Cauchy(loc + |b| eps, scale)."""
    noise = Cauchy(torch.zeros_like(u.loc), action.b_noise.abs().expand_as(u.loc)).sample(draws.kept(u.loc))
    return Cauchy(u.loc + noise, u.scale)


def point(action: Action, u: Cauchy, draws: Draws) -> Cauchy:
    """An individual drawn and no noise: all of U' at u."""
    return Cauchy(u.sample(draws.fresh(u.loc)), torch.zeros_like(u.scale))


def best(action: Action, u_prime: Cauchy, draws: Draws, options: Options) -> Tensor:
    """argmax P, equal P told apart by loc_S (or argmax loc_S): [B]."""
    _, ids = ovr_topk(*_head(action, u_prime), 1, used_rows=options.used_rows, rank_by=options.rank_by)
    return ids[:, 0]


def softmax_sample(action: Action, u_prime: Cauchy, draws: Draws, options: Options) -> Tensor:
    """As an ordinary language model: softmax(loc_S / temperature), top-k, then top-p; greedy without sampling: [B]."""
    loc, _, weight, bias, _ = _head(action, u_prime)
    logits = (loc @ weight.T + bias).float()
    if not options.do_sample or options.temperature == 0.0:
        return logits.argmax(-1)
    return draws.pick(truncate(logits / options.temperature, options.top_k, options.top_p).softmax(-1))


def ovr_sample(action: Action, u_prime: Cauchy, draws: Draws, options: Options) -> Tensor:
    """One of the words in use with probability P / sum P; argmax where every P is 0: [B]."""
    weight = action.cls_weight
    words = torch.arange(min(options.used_rows, weight.shape[0]), device=weight.device)
    rows = max(1, CHUNK_BYTES // (weight.shape[1] * weight.element_size()))
    head = _head(action, u_prime)
    p = torch.cat([ovr_prob_at(*head, some) for some in words.split(rows)], dim=1)
    none = p.sum(-1) == 0
    if not none.any():
        return draws.pick(p)
    return torch.where(none, best(action, u_prime, draws, options), draws.pick(p + none[:, None]))


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """logits [B,V] with -inf outside the top_k best (0: all) and outside the fewest best whose sum reaches top_p.

    Hugging Face's rules: words that tie with the k-th stay; the word that crosses top_p stays.
    """
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        tail = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p
        tail[:, -1] = False
        logits = logits.masked_fill(tail.scatter(1, order, tail), -torch.inf)
    return logits


@dataclass(frozen=True)
class Mode:
    """A law, a choice, and how `best` ranks unless the caller says."""

    law: Law
    choose: Choose
    rank_by: Literal["ovr", "loc"] = "ovr"


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


def _head(action: Action, u: Cauchy) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loc, scale, weight, bias, threshold) as the functions of `ops.ovr` take them, U in the weight's dtype."""
    weight = action.cls_weight
    return u.loc.to(weight.dtype), u.scale.to(weight.dtype), weight, action.cls_bias, action.threshold
