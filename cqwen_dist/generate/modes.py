"""The modes of generation. Each decides the next word and number by two functions.

    law(action, U, draws)                      -> U', the action network's input: parts of it are drawn, or stay laws
    choose(action, U', draws, options, ids)    -> the word of each row; the number is the location of Y(U')

    mode        law of U'                                  word
    standard    Cauchy(loc, scale + |b|)                   argmax P                        S3 3.1
    compatible  the same                                   softmax(loc_S) over all of V    S3 3.3
    ovr         the same                                   drawn from P / sum P            S3 3.3, last paragraph
    causal      Cauchy(u, |b|), u drawn at every step      argmax P                        S3 3.2
    individual  Cauchy(u, |b|), u from one eps_seed        argmax P                        S3 3.4.1
    noise       Cauchy(loc + |b| eps, scale), one eps      argmax P                        S3 3.4.2
    sample      the point u, drawn at every step           argmax S(u)                     S4 2.4.2

b is b_noise. Draws use `temperature` times the scale (1: as inferred; 0: the location itself); in compatible the
temperature is one of Hugging Face's processors. Letters: B rows, C causal dimension, V vocabulary. All tensors belong
to one position: [B,C], at most [B,V]. action: a `heads.action.ActionNetwork` with all V rows on this device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from cqwen_dist.config.errors import UserError
from cqwen_dist.ops.cauchy import Cauchy, prob_above
from cqwen_dist.ops.ovr.best import RowSizes, all_scores, best_word, strongest


@dataclass
class Draws:
    """The randomness of one generation."""

    generator: torch.Generator | None = None  # None: torch's global state
    temperature: float = 1.0  # multiplies the scale that is drawn from
    eps_truncation: float = 0.0  # uniforms stay this far from 0 and 1, which cuts off a Cauchy's far tails
    # [B,C] uniforms or [B,n] exponentials of one step, drawn before it: a compiled step cannot draw from a generator.
    ahead: Tensor | None = field(default=None, repr=False)
    _kept: Tensor | None = field(default=None, repr=False)

    def from_law(self, law: Cauchy, once: bool) -> Tensor:
        """loc + temperature scale tan(pi (eps - 1/2)), [B,C]. once: the first call draws eps, and it stays."""
        eps = self._kept if self.ahead is None else self.ahead
        if eps is None:
            eps = self.fill(torch.empty_like(law.loc), Tensor.uniform_)
            self._kept = eps if once else None
        eps = eps.clamp(self.eps_truncation, 1.0 - self.eps_truncation)
        return Cauchy(law.loc, law.scale * self.temperature).sample(eps)

    def pick(self, weights: Tensor) -> Tensor:
        """One index for each row [B], in proportion to weights [B,n] (>= 0, not all 0).

        As torch.multinomial, to the draw, without its checks, for which the host waits: the first of exponential
        clocks that run at these rates.
        """
        clocks = self.fill(torch.empty_like(weights), Tensor.exponential_) if self.ahead is None else self.ahead
        return (weights / clocks).argmax(-1)

    def fill(self, memory: Tensor, law: Callable[..., Tensor]) -> Tensor:
        """memory, filled with draws; law: Tensor.uniform_ or Tensor.exponential_."""
        if self.generator is None or self.generator.device == memory.device:
            return law(memory, generator=self.generator)
        return memory.copy_(law(torch.empty_like(memory, device=self.generator.device), generator=self.generator))

    def draw_ahead(self, memory: Tensor, law: Callable[..., Tensor]) -> None:
        """Draw a step's random numbers before it, into memory, in the order in which the step would."""
        if self._kept is None:
            self.ahead = self.fill(memory, law)
        elif self.ahead is None:
            self.ahead = memory.copy_(self._kept)


@dataclass(frozen=True)
class Options:
    """Settings of a choice."""

    used_rows: int  # words from this row on are never chosen, except in `compatible`
    rank_by: Literal["ovr", "loc"] = "ovr"
    do_sample: bool = True  # for `compatible`
    # For `compatible`: (ids [B,t], logits [B,V]) -> logits.
    processors: Callable[[Tensor, Tensor], Tensor] | None = None
    added_from: int | None = None  # for `compatible`: rows from this one on are not the base's, and never chosen
    sizes: RowSizes | None = None  # of the rows of W_cls: `best_word` needs fewer scales by them; None: all of them
    near: Tensor | None = None  # W_cls in bf16, of which `best_word` makes a shortlist


def best(action: Any, u_prime: Cauchy, draws: Draws, options: Options, ids: Tensor) -> Tensor:
    """argmax P [B], ties decided by loc_S; with rank_by "loc" argmax loc_S."""
    u, head = u_prime.to(action.cls_weight.dtype), action.word_head(options.used_rows)
    if options.rank_by == "ovr":
        return best_word(u, head, options.sizes, options.near)
    used = head.take(slice(0, head.rows))
    return (all_scores(u, used)[1].loc if u.loc.is_cuda else used.loc(u)).argmax(1)  # there |W| costs nothing


def softmax_sample(action: Any, u_prime: Cauchy, draws: Draws, options: Options, ids: Tensor) -> Tensor:
    """A draw from softmax(loc_S) after the processors, or its argmax without do_sample: [B]."""
    logits = action.word_head().loc(u_prime.to(action.cls_weight.dtype)).float()
    if options.added_from is not None:
        logits[:, options.added_from :] = -math.inf
    if options.processors is not None:
        logits = options.processors(ids, logits)
    return draws.pick(logits.softmax(-1)) if options.do_sample else logits.argmax(-1)


def ovr_sample(action: Any, u_prime: Cauchy, draws: Draws, options: Options, ids: Tensor) -> Tensor:
    """A draw among the words in use with probability P / sum P; the best word where every P is 0: [B]."""
    gap, scores = _used(action, u_prime, options.used_rows)
    p = prob_above(scores.scale, gap)
    none = p.sum(-1) == 0
    return torch.where(none, strongest(gap, scores), draws.pick(p + none[:, None]))


def prob_words(action: Any, u_prime: Cauchy, used_rows: int, threshold: float | None = None) -> Tensor:
    """P of every word in use [B,used_rows], fp32. threshold replaces the model's own C."""
    gap, scores = _used(action, u_prime, used_rows)
    return prob_above(scores.scale, gap if threshold is None else threshold - scores.loc)


def _used(action: Any, u_prime: Cauchy, used_rows: int) -> tuple[Tensor, Cauchy]:
    """`all_scores` of the words in use."""
    head = action.word_head(used_rows)
    return all_scores(u_prime.to(action.cls_weight.dtype), head.take(slice(0, head.rows)))


@dataclass(frozen=True)
class Mode:
    """What is drawn before a decision, how a word is chosen, and how `best` ranks words by default."""

    choose: Callable[[Any, Cauchy, Draws, Options, Tensor], Tensor]
    drawn: Literal["individual", "noise"] | None = None  # the other one of the two stays a law; None: both do
    once: bool = False  # the same quantiles at every step; else it is drawn anew
    noise: bool = True  # False: an individual without noise, the point u
    rank_by: Literal["ovr", "loc"] = "ovr"

    @property
    def has_temperature(self) -> bool:
        """Whether a temperature changes the result: of the logits, or of the law that is drawn from."""
        return self.choose is softmax_sample or self.drawn is not None

    @property
    def draws(self) -> bool | None:
        """Whether it draws; None: as do_sample says."""
        return None if self.choose is softmax_sample else self.drawn is not None or self.choose is ovr_sample

    def random(self, action: Any, options: Options) -> tuple[Callable[..., Tensor], int] | None:
        """What a step draws for a row: the law, as `Draws.fill` takes it, and how many numbers; None: nothing."""
        if self.drawn is not None:
            return Tensor.uniform_, action.b_noise.numel()
        if self.choose is ovr_sample:
            return Tensor.exponential_, action.word_head(options.used_rows).rows
        if self.choose is softmax_sample and options.do_sample and options.processors is None:
            return Tensor.exponential_, action.cls_weight.shape[0]
        return None

    def law(self, action: Any, u: Cauchy, draws: Draws) -> Cauchy:
        """U' by U, [B,C] each."""
        if self.drawn is None:
            return Cauchy(*action.add_noise(u))
        zero = torch.zeros_like(u.loc)
        noise = Cauchy(zero, action.b_noise.abs().expand_as(u.loc))
        if self.drawn == "noise":
            return Cauchy(u.loc + draws.from_law(noise, self.once), u.scale)
        return Cauchy(draws.from_law(u, self.once), noise.scale if self.noise else zero)


MODES: dict[str, Mode] = {
    "standard": Mode(best),
    "causal": Mode(best, drawn="individual"),
    "compatible": Mode(softmax_sample),
    "ovr": Mode(ovr_sample),
    "individual": Mode(best, drawn="individual", once=True),
    "noise": Mode(best, drawn="noise", once=True),
    "sample": Mode(best, drawn="individual", noise=False, rank_by="loc"),
}


def find_mode(name: str) -> Mode:
    """The mode with this name. Raises `UserError` with the list of modes."""
    if name not in MODES:
        raise UserError("mode", name, ", ".join(MODES))
    return MODES[name]
