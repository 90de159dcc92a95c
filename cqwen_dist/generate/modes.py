"""The modes of generation. Two functions decide the next word and number.

    law(action, U, draws)                      -> U', input of the action network: parts are drawn, parts stay laws;
                                                  U' as words read it, and as numbers do
    choose(action, U', draws, options, ids)    -> the word of each row; the number is the location of Y(U')

    mode        law of U'                                  word
    standard    Cauchy(loc, scale + |b|)                   argmax P                        S3 3.1
    compatible  the same                                   softmax(loc_S) over all of V    S3 3.3
    ovr         the same                                   drawn from P / sum P            S3 3.3, last paragraph
    causal      Cauchy(u, |b|), u drawn in each step       argmax P                        S3 3.2
    individual  Cauchy(u, |b|), u from one eps_seed        argmax P                        S3 3.4.1
    noise       Cauchy(loc + |b| eps, scale), one eps      argmax P                        S3 3.4.2
    sample      the point u, drawn in each step            argmax S(u)                     S4 2.4.2

b is b_noise. Draws use `temperature` times the scale (1: the inferred law; 0: its location), for words
`word_temperature` times the scale, of the same eps. In compatible and ovr the temperature is one of Hugging Face's
processors: of loc_S, or of log P, whose softmax is P / sum P. Shape letters: B rows, C causal dimensions, V vocabulary.
All tensors belong to one position: [B,C], at most [B,V]. action: a `heads.action.ActionNetwork` with all V rows on this
device.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cqwen_dist.config.errors import UserError
from cqwen_dist.ops.cauchy import Cauchy, log_prob_above, prob_above
from cqwen_dist.ops.ovr.best import RowSizes, Shut, all_scores, best_word, strongest

ModeName = str | Mapping[str, str]  # as `mode_names` reads it


class Laws(NamedTuple):
    """U' [B,C] as words read it, and as numbers do. An individual is one eps for both."""

    words: Cauchy
    numbers: Cauchy


@dataclass
class Draws:
    """The randomness of one generation."""

    generator: torch.Generator | None = None  # None: torch's global state
    temperature: float = 1.0  # factor of the scale in draws
    eps_truncation: float = 0.0  # clamps uniforms to this distance from 0 and 1, which cuts the far tails
    words: tuple[float, float] | None = None  # (temperature, eps_truncation) of what words read; None: the same
    apart: "Draws | None" = None  # of numbers that have another mode
    # [B,C] uniforms or [B,n] exponentials of one step, drawn before it: a compiled step cannot draw from a generator.
    ahead: Tensor | None = field(default=None, repr=False)
    _kept: Tensor | None = field(default=None, repr=False)

    def from_law(self, law: Cauchy, once: bool) -> tuple[Tensor, Tensor]:
        """Draw loc + temperature scale tan(pi (eps - 1/2)), [B,C]: (as words read it, as numbers do), of one eps.
        once: later calls reuse the first eps."""
        eps = self._kept if self.ahead is None else self.ahead
        if eps is None:
            eps = self.fill(torch.empty_like(law.loc), Tensor.uniform_)
            self._kept = eps if once else None

        def drawn(temperature: float, cut: float) -> Tensor:
            return Cauchy(law.loc, law.scale * temperature).sample(eps.clamp(cut, 1.0 - cut))

        number = drawn(self.temperature, self.eps_truncation)
        return number if self.words is None else drawn(*self.words), number

    def pick(self, weights: Tensor) -> Any:
        """Draw one index per row [B] with probability proportional to weights [B,n] (>= 0); value 0 if all weights are.

        Gives the same draws as torch.multinomial, without its checks, which synchronise. The first of exponential
        clocks with these rates is such a draw.
        """
        clocks = self.fill(torch.empty_like(weights), Tensor.exponential_) if self.ahead is None else self.ahead
        return (weights / clocks).max(-1)

    def fill(self, memory: Tensor, law: Callable[..., Tensor]) -> Tensor:
        """Fill memory with draws. law: Tensor.uniform_ or Tensor.exponential_."""
        if self.generator is None or self.generator.device == memory.device:
            return law(memory, generator=self.generator)
        return memory.copy_(law(torch.empty_like(memory, device=self.generator.device), generator=self.generator))

    def draw_ahead(self, memory: Tensor, law: Callable[..., Tensor]) -> None:
        """Draw the random numbers of a step into memory before the step, in the same order as the step."""
        if self._kept is None:
            self.ahead = self.fill(memory, law)
        elif self.ahead is None:
            self.ahead = memory.copy_(self._kept)


@dataclass(frozen=True)
class Options:
    """Options of `choose`."""

    used_rows: int  # words from this row on are never chosen, except in `compatible`
    rank_by: Literal["ovr", "loc"] = "ovr"
    do_sample: bool = True  # for `compatible` and `ovr`
    # For `compatible` and `ovr`: (ids [B,t], logits [B,V]) -> logits.
    processors: Callable[[Tensor, Tensor], Tensor] | None = None
    added_from: int | None = None  # for `compatible`: rows from this one on were added to the base; never chosen
    sizes: RowSizes | None = None  # row norms of W_cls, with which `best_word` needs fewer scales; None: all scales
    near: Tensor | None = None  # W_cls in bf16, for the shortlist of `best_word`


def best(action: Any, u_prime: Cauchy, draws: Draws, options: Options, ids: Tensor, shut: Shut | None = None) -> Tensor:
    """argmax P [B], ties go to the larger loc_S; with rank_by "loc" argmax loc_S."""
    u, head = u_prime.to(action.cls_weight.dtype), action.word_head(options.used_rows)
    if options.rank_by == "ovr":
        return best_word(u, head, options.sizes, options.near, shut)
    used = head.take(slice(0, head.rows))
    loc = all_scores(u, used)[1].loc if u.loc.is_cuda else used.loc(u)  # on CUDA |W| is free
    return (loc if shut is None else shut.on(loc, -math.inf)).argmax(1)


def softmax_sample(
    action: Any, u_prime: Cauchy, draws: Draws, options: Options, ids: Tensor, shut: Shut | None = None
) -> Tensor:
    """A draw [B] from softmax(loc_S) after the processors; its argmax without do_sample."""
    loc = action.word_head().loc(u_prime.to(action.cls_weight.dtype))
    loc = loc if shut is None else shut.on(loc, -math.inf)
    return _drawn(softmax_logits(loc, options.added_from), draws, options, ids)


def ovr_sample(
    action: Any, u_prime: Cauchy, draws: Draws, options: Options, ids: Tensor, shut: Shut | None = None
) -> Tensor:
    """A draw [B] among the words in use with probability P / sum P, after the processors of log P; the best word
    without do_sample, or if all P are 0."""
    gap, scores = _used(action, u_prime, options.used_rows, shut)
    if options.processors is not None:  # they see log P of the whole vocabulary
        return _drawn(ovr_logits(gap, scores, action.vocab_size), draws, options, ids)
    if not options.do_sample:
        return strongest(gap, scores)
    # P is enough without them, at half the time of log P. If all are 0, each strength is -inf: the largest loc_S wins
    first = draws.pick(prob_above(scores.scale, gap))
    return torch.where(first.values == 0, scores.loc.argmax(-1), first.indices)


def _drawn(logits: Tensor, draws: Draws, options: Options, ids: Tensor) -> Tensor:
    """A draw [B] from the softmax of these logits after the processors; its argmax without do_sample."""
    if options.processors is not None:
        logits = options.processors(ids, logits)
    return draws.pick(logits.softmax(-1)).indices if options.do_sample else logits.argmax(-1)


def softmax_logits(loc: Tensor, added_from: int | None) -> Tensor:
    """The logits [..., V] of mode compatible, fp32: loc_S, -inf for words from added_from on."""
    logits = loc.float()
    return logits if added_from is None else _filled(logits[..., :added_from], logits.shape[-1])


def ovr_logits(gap: Tensor, scores: Cauchy, rows: int | None = None) -> Tensor:
    """The logits of the other modes from S [..., v] of the words in use and gap = C - loc_S: log P, -inf for further
    words up to `rows`. Their softmax is P / sum P, and the largest is that of the best word."""
    logits = log_prob_above(scores.scale, gap)
    # log P rounds more coarsely than z, and is -inf at P = 0: the best word gets the next number above the largest
    best = strongest(gap, scores)[..., None]
    its = logits.gather(-1, best).clamp(min=torch.finfo(logits.dtype).min)
    top = logits.detach().amax(-1, keepdim=True)
    logits = logits.scatter(-1, best, its + (torch.nextafter(top, torch.full_like(top, math.inf)) - its).detach())
    return logits if rows is None else _filled(logits, rows)


def _filled(logits: Tensor, rows: int) -> Tensor:
    """[..., v] -> [..., rows]: -inf for the words behind v, which are never written."""
    return nn.functional.pad(logits, (0, rows - logits.shape[-1]), value=-math.inf)


def prob_words(action: Any, u_prime: Cauchy, used_rows: int, threshold: float | None = None) -> Tensor:
    """P [B,used_rows] of all words in use, fp32. threshold replaces the model's C."""
    gap, scores = _used(action, u_prime, used_rows)
    return prob_above(scores.scale, gap if threshold is None else threshold - scores.loc)


def _used(action: Any, u_prime: Cauchy, used_rows: int, shut: Shut | None = None) -> tuple[Tensor, Cauchy]:
    head = action.word_head(used_rows)
    return all_scores(u_prime.to(action.cls_weight.dtype), head.take(slice(0, head.rows)), shut)


@dataclass(frozen=True)
class Mode:
    """A mode: the drawn part, the choice of a word, and the default ranking of `best`; numbers may have their own."""

    choose: Callable[..., Tensor]  # as `best`
    drawn: Literal["individual", "noise"] | None = None  # the drawn part; the other part stays a law. None: neither
    once: bool = False  # reuse the same quantiles in each step instead of drawing again
    noise: bool = True  # False: an individual without noise, the point u
    rank_by: Literal["ovr", "loc"] = "ovr"
    numbers: "Mode | None" = None  # None: the same

    @property
    def has_logits(self) -> bool:
        """Whether words are drawn from a softmax, which Hugging Face's processors change."""
        return self.choose in (softmax_sample, ovr_sample)

    @property
    def draws(self) -> bool | None:
        """Whether the mode draws; None: do_sample decides."""
        return None if self.choose is softmax_sample else self.drawn is not None or self.choose is ovr_sample

    def random(self, action: Any, options: Options) -> tuple[Callable[..., Tensor], int] | None:
        """Random numbers per row and step: (law for `Draws.fill`, count); None if a step draws no numbers."""
        if self.drawn is not None:
            return Tensor.uniform_, action.b_noise.numel()
        if not self.has_logits or not options.do_sample or options.processors is not None:
            return None
        rows = None if self.choose is softmax_sample else options.used_rows
        return Tensor.exponential_, action.word_head(rows).rows

    def noise_of(self, action: Any, u_prime: Cauchy) -> Cauchy:
        """U' [B,C] with the noise's part of its scale; the rest is the individual's."""
        if self.drawn == "noise" or not self.noise:
            return Cauchy(u_prime.loc, torch.zeros_like(u_prime.scale))
        return Cauchy(u_prime.loc, action.b_noise.abs().to(u_prime.scale).expand_as(u_prime.scale))

    def law(self, action: Any, u: Cauchy, draws: Draws) -> Laws:
        """U' from U, both [B,C]."""
        if self.numbers is None or draws.apart is None:
            return self._of_both(action, u, draws)
        # They draw first: with one seed, their individual is that of their own mode
        numbers = self.numbers.law(action, u, draws.apart).numbers
        return Laws(self._of_both(action, u, draws).words, numbers)

    def _of_both(self, action: Any, u: Cauchy, draws: Draws) -> Laws:
        """`law`, if numbers have the mode of words."""
        if self.drawn is None:
            return Laws(*2 * (Cauchy(*action.add_noise(u)),))
        law, rest = u, self.noise_of(action, u).scale
        if self.drawn == "noise":
            law, rest = Cauchy(torch.zeros_like(u.loc), action.b_noise.abs().expand_as(u.loc)), u.scale
        words, numbers = draws.from_law(law, self.once)
        numbers = action.number_head.individual(Cauchy(law.loc, law.scale * draws.temperature), numbers)
        if self.drawn == "noise":
            return Laws(*(Cauchy(u.loc + part, u.scale) for part in (words, numbers)))
        return Laws(*(Cauchy(part, rest) for part in (words, numbers)))


MODES: dict[str, Mode] = {
    "standard": Mode(best),
    "causal": Mode(best, drawn="individual"),
    "compatible": Mode(softmax_sample),
    "ovr": Mode(ovr_sample),
    "individual": Mode(best, drawn="individual", once=True),
    "noise": Mode(best, drawn="noise", once=True),
    "sample": Mode(best, drawn="individual", noise=False, rank_by="loc"),
}


def mode_names(mode: ModeName) -> tuple[str, str | None]:
    """(the mode of words, that of numbers if it is another) for a name, {"words": ..., "numbers": ...}, or
    "words=...,numbers=...". Raises `UserError`."""
    names = _by_kind(mode)
    if names.keys() != {"words", "numbers"}:
        raise UserError("mode", mode, "a mode of words and one of numbers: words=compatible,numbers=individual")
    words, numbers = names["words"], names["numbers"]
    if odd := [name for name in (words, numbers) if name not in MODES]:
        raise UserError("mode", odd[0], ", ".join(MODES))
    of_words = [name for name, other in MODES.items() if other.has_logits]
    if numbers == words or (numbers == "standard" and words in of_words):
        return words, None
    if numbers in of_words:
        allowed = ", ".join(name for name in MODES if name not in of_words)
        raise UserError("mode: numbers", numbers, f"{allowed}; {numbers} draws words only")
    return words, numbers


def _by_kind(mode: ModeName) -> dict[str, str]:
    if isinstance(mode, Mapping):
        return dict(mode)
    if "=" not in str(mode):
        return {"words": mode, "numbers": mode}
    return dict(part.partition("=")[::2] for part in mode.split(","))


def find_mode(mode: ModeName) -> Mode:
    """The mode with this name or these names (`mode_names`). Raises `UserError` with the list of modes."""
    words, numbers = mode_names(mode)
    return MODES[words] if numbers is None else replace(MODES[words], numbers=MODES[numbers])
