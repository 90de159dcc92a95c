"""A fact observed, then changed (S3 1, Pearl's three steps): who is the individual, given what was observed, and what
would have come after a changed prompt?

An individual keeps its quantile in every dimension of U's law (D50): u_j(t) = loc_j(t) + scale_j(t) tau_j. A number
reads sum_j w_j u_j, so an observed number is a sum of the tau and of the noise (`quantile_given_sum`). The noise is
drawn anew under the change. A number's own law may differ from the Cauchy: a logarithm, recalibrated or limited
intervals. It is the Cauchy moved quantile by quantile.

Letters: B facts, C dimensions of U, N draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cqwen_dist.batch import last_places, positions_in
from cqwen_dist.config.errors import UserError
from cqwen_dist.generate.continuation import Prompt, encoded, padded
from cqwen_dist.generate.decisions import at_end
from cqwen_dist.generate.streaming import Tokenizer, reader
from cqwen_dist.heads.intervals import LEVELS, Intervals, number_interval
from cqwen_dist.heads.precision import at_hand
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.ops.cauchy import EPS_UNIFORM, Cauchy, prob_above, quantile_given_sum
from cqwen_dist.ops.ovr.best import best_word

MIDDLE = len(LEVELS)
OF_ENDS = (*((1 - level) / 2 for level in LEVELS[::-1]), 0.5, *((1 + level) / 2 for level in LEVELS))
FARTHEST = 1e6  # quantile of the standard Cauchy at which a fact may be
AT_ONCE, DRAWS, ENOUGH = 1024, 8192, 200  # individuals drawn for a word: until so many draws' worth say it


class NumberLaws(NamedTuple):
    """The next number after B texts."""

    ends: Tensor  # [B,7] float64, raw unit: its quantiles at `OF_ENDS`, as predictions show them
    parts: Tensor  # [B,C] float64, |w| scale_U: the individual's part of the scale of Y, by dimension
    noise: Tensor  # [B] float64, |w| |b_noise|: the rest of it
    unit: TargetTransform


@dataclass(frozen=True)
class NumberFact:
    """An observed number, and the number under the change."""

    observed: float
    within: float | None  # the level of the fact's smallest interval that holds this number; None: outside of all
    predicted: float  # under the change, without the fact
    value: float  # with it: the median
    intervals: dict[str, tuple[float, float]]  # of value, by level
    effect: float  # value - observed

    def __str__(self) -> str:
        inside = "outside of all its intervals" if self.within is None else f"inside its {self.within:.0%} interval"
        low, high = self.intervals["0.9"]
        said = f"{self.value:.6g}, with 90 % between {low:.6g} and {high:.6g}; effect {self.effect:+.6g}"
        return f"observed {self.observed:g}, {inside}\nwould be {said}\nwithout the fact {self.predicted:.6g}"


@dataclass(frozen=True)
class WordFact:
    """A next word observed, and the words that the same individuals would say."""

    observed: str
    p: float  # share of all individuals that say the word
    draws: float  # number of independent individuals that the weighted draws are worth
    words: dict[str, float]  # by text, the most frequent first: share of the individuals that say the word observed

    def __str__(self) -> str:
        said = f"{self.p:.2g} of all individuals say {self.observed!r} ({self.draws:.0f} draws); of these would say"
        return "\n".join([said, *(f"    {word!r}   {share:.1%}" for word, share in [*self.words.items()][:8])])


@torch.no_grad()
def counterfactual(
    model: Any, tokenizer: Tokenizer, fact: Prompt, observed: float | str, what_if: Prompt, seed: int = 0
) -> NumberFact | WordFact:
    """What would have come after `what_if`, if `observed` came after `fact`.

    model: a `CausalQwenForCausalLM`. observed: a number, or a word of the vocabulary. seed: of the draws for a word.
    Raises `UserError`, also if a number was observed and the model writes none next.
    """
    read, word = reader(tokenizer), -1
    try:
        number = float(observed)
        if not math.isfinite(number):
            raise UserError("--observed", observed, "a finite number, or a word")
    except ValueError:
        ids, values = read.encode(str(observed), begin=False)
        if len(ids) != 1:
            raise UserError("--observed", observed, "a number such as 37.8, or one word of the vocabulary") from None
        word, number = (ids[0], 0.0) if ids[0] != read.num_token_id else (-1, values[0])
    rows = [encoded(read, text) for text in (fact, what_if)]
    with at_hand(model.model.action):
        u = [at_end(model, padded(model, read, [row])) for row in rows]
        if word >= 0:
            found = _of_word(model, u[0], u[1], word, torch.Generator().manual_seed(seed))
            if found is None:
                raise UserError("--observed", observed, f"a word that individuals say there: none of {DRAWS:,} does")
            p, draws, shares = found
            return WordFact(str(observed), p, draws, {read.decode([word]): share for word, share in shares.items()})
        for text, law in zip((fact, what_if), u, strict=True):
            noise = model.model.action.add_noise(law).scale
            if (said := int(_best(model, law.loc, noise))) != read.num_token_id:
                raise UserError(
                    "prompt", text, f"a text that the model goes on with a number; here {read.decode([said])!r}"
                )
        return kept_numbers(
            torch.tensor([number], dtype=torch.float64), *(number_laws(model, read, [row]) for row in rows)
        )[0]


def _best(model: Any, u: Tensor, noise: Tensor) -> Tensor:
    """The words [N] of U' ~ Cauchy(u, noise) [N,C]."""
    action = model.model.action
    law = action.word_part(Cauchy(u, noise)).to(action.cls_weight)
    return best_word(law, action.word_head(int(model.config.used_rows)), None).cpu()


@torch.no_grad()
def number_laws(model: Any, tokenizer: Tokenizer, rows: Sequence[tuple[list[int], list[float]]]) -> NumberLaws:
    """The law of the number after each text (ids, values), as predictions show it. Raises `UserError`."""
    batch, action = padded(model, tokenizer, rows), model.model.action
    head, known = action.number_head, Intervals.from_dict(model.config.calibration)
    u, number = at_end(model, batch), (batch.ids == model.config.num_token_id) & batch.mask
    memory = head.memory(batch.ids, number, batch.values, positions_in(batch.mask), last_places(batch.ids))
    with at_hand(action):
        scale = action.add_noise(u).scale.requires_grad_()
        with torch.enable_grad():  # in every head the scale is linear in that of U': the slope is |w|
            y = head.decide(Cauchy(u.loc, scale), memory, known.bar).y
            (weight,) = torch.autograd.grad(y.scale.sum(), scale)
        parts, noise = weight.double() * u.scale, weight.double() @ action.b_noise.abs().double()
    lows, highs = zip(*(number_interval(y, head.target, known, level) for level in LEVELS), strict=True)
    ends = torch.stack([*lows[::-1], head.target.inverse(y.loc), *highs], -1)
    ends, parts, noise = (part.detach().cpu() for part in (ends, parts, noise))
    return NumberLaws(ends, parts, noise, head.target)


def kept_numbers(observed: Tensor, fact: NumberLaws, change: NumberLaws) -> list[NumberFact]:
    """The numbers under a change, given those observed [B] float64, raw unit."""
    levels = torch.tensor(OF_ENDS, dtype=torch.float64)
    steps = torch.tan(math.pi * (levels - 0.5)).expand(len(observed), -1)  # quantiles of the standard Cauchy
    own, other = (law.unit.forward(law.ends).double() for law in (fact, change))
    place = _moved(fact.unit.forward(observed).double().unsqueeze(-1), own, steps).clamp(-FARTHEST, FARTHEST)
    scales = [(law.parts.sum(-1) + law.noise).unsqueeze(-1) for law in (fact, change)]
    x = quantile_given_sum(levels, (place * scales[0])[:, 0], fact.parts, change.parts, fact.noise, change.noise)
    kept = change.unit.inverse(_moved(x / scales[1], steps, other))
    found = []
    for y, before, free, given in zip(*(e.tolist() for e in (observed, fact.ends, change.ends, kept)), strict=True):
        inside = (float(level) for level, (low, high) in _pairs(before).items() if low <= y <= high)
        value = given[MIDDLE]
        found.append(NumberFact(y, next(inside, None), free[MIDDLE], value, _pairs(given), value - y))
    return found


def _pairs(ends: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Intervals by level."""
    return {f"{level:g}": (ends[MIDDLE - i], ends[MIDDLE + i]) for i, level in enumerate(LEVELS, 1)}


def _moved(x: Tensor, known: Tensor, to: Tensor) -> Tensor:
    """x [B,K] by the lines through the points (known, to), ascending, [B,7] each; beyond them by the line from the
    middle through the outer one, as outer ones may be equal."""
    last, after = known.shape[-1] - 1, torch.searchsorted(known.contiguous(), x.contiguous())
    low = torch.where(after > last, MIDDLE, (after - 1).clamp(min=0))
    high = torch.where(after == 0, MIDDLE, after.clamp(max=last))
    (a, b), (p, q) = ((line.gather(-1, low), line.gather(-1, high)) for line in (known, to))
    return p + (x - a) * (q - p) / (b - a).clamp(min=1e-12)


def _of_word(
    model: Any, fact: Cauchy, change: Cauchy, word: int, draw: torch.Generator
) -> tuple[float, float, dict[int, float]] | None:
    """(share of all individuals that say the word, how many the draws are worth, what these say under the change and
    their shares); None if no draw says the word. fact, change: U [1,C]."""
    action = model.model.action
    heat, cut = Intervals.from_dict(model.config.calibration).word_draws(1.0, EPS_UNIFORM)
    fact, change = (Cauchy(law.loc, law.scale * heat) for law in map(action.word_part, (fact, change)))
    noise, far = action.b_noise.abs()[: action.word_size], 1 / math.tan(math.pi * cut)
    towards = None
    if (usual := int(_best(model, fact.loc, noise.expand_as(fact.loc)))) != word:
        # Only individuals to whom the word is better than the usual one: a half-space
        two = action.word_head().take(torch.tensor([word, usual], device=noise.device))
        s, gap = two.of_own(Cauchy(fact.loc.expand(2, -1), noise.expand(2, -1)))
        rows, z = (part.double().cpu() for part in (two.weight / s.scale.unsqueeze(-1), gap / s.scale))
        towards = (rows[0] - rows[1]) * fact.scale[0].double().cpu(), z[0] - z[1]

    def said(law: Cauchy, tau: Tensor) -> Tensor:
        u = law.loc + law.scale * tau.to(noise.device)
        return _best(model, u, noise.expand_as(u))

    total, weight, words = 0, torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    while total < DRAWS and weight.sum() ** 2 <= ENOUGH * weight.square().sum():
        eps = torch.rand(AT_ONCE, action.word_size, generator=draw, dtype=torch.float64)
        tau, own = (math.pi * (eps - 0.5)).tan().clamp(-far, far), torch.ones_like(eps[:, 0])
        tau, own = (tau, own) if towards is None else _beyond(tau, *towards, far, draw)
        says, total = said(fact, tau) == word, total + AT_ONCE
        weight, words = torch.cat([weight, own[says]]), torch.cat([words, said(change, tau[says])])
    if not float(weight.sum()):
        return None
    share = weight / weight.sum()
    shares = {int(k): float(share[words == k].sum()) for k in words.unique()}
    ordered = dict(sorted(shares.items(), key=lambda of: -of[1]))
    return float(weight.sum() / total), float(1 / share.square().sum()), ordered


def _beyond(tau: Tensor, a: Tensor, least: Tensor, far: float, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Individuals [N,C] with tau a >= least, from draws without this condition, and their weights [N]. far: the largest
    tau, to which larger ones are clamped.

    One tau of each, taken in proportion to |a|, is drawn again, beyond what the rest of the sum leaves. The weight is
    the density that is wanted by that of this mixture; its mean is P(tau a >= least).
    """
    part = a.abs() / a.abs().sum()
    j = torch.multinomial(part, len(tau), replacement=True, generator=draw).unsqueeze(-1)

    def beyond(tau: Tensor) -> Tensor:
        """P [N,C] of each dimension that the sum is large enough, given all other dimensions."""
        left = (least - (tau @ a).unsqueeze(-1)) / a.abs() + tau * a.sign()
        return torch.where(left <= -far, 1.0, prob_above(torch.ones_like(left), left))

    # The angle of a uniform share of this probability: precise far out
    angle = math.pi * beyond(tau).gather(-1, j) * torch.rand(j.shape, generator=draw, dtype=tau.dtype)
    again = (1 / angle.clamp(min=1e-300).tan()).clamp(-far, far)
    tau = tau.scatter(-1, j, a.sign()[j] * again)
    return tau, 1 / torch.where(part > 0, part / beyond(tau), 0.0).sum(-1)
