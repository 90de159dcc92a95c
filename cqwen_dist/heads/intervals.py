"""What held-out texts have calibrated: the widths of intervals around numbers, the bar of exact numbers, the
probabilities of words, how doubtful an answer may be, and how wide individuals are drawn for words. An interval is
quantiles of its law, times measured factors if any.

A Cauchy fitted to light-tailed errors is too wide at 90 %; `number_metrics` measures the factors on held-out numbers. A
run stores them with its metrics, an exported folder in `calibration.json`:
{"levels": {"0.5": [f, ...], "0.9": [f, ...], "0.95": [f, ...]}, "edges": [e, ...], "n": n, "bar": p, "words":
{"shift": s, "factor": f}, "doubts": {"words": [...], "numbers": [...]}, "word_temperature": t}.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.ops.cauchy import Cauchy

FILE = "calibration.json"
LEVELS = (0.5, 0.9, 0.95)
SHARES = tuple(round(0.05 * i, 2) for i in range(1, 21))  # of held-out answers, for `Intervals.doubts`
WORD_TAILS = 0.01  # eps of an individual's words keep this distance from 0 and 1 at the calibrated word temperature


class WordScale(NamedTuple):
    """How a word's probability is shown: P' = 1/2 + atan((z - shift) / factor)/pi for a decision strength z."""

    shift: float
    factor: Any  # a float, or several

    def law(self, scores: Cauchy) -> Cauchy:
        """Scores [...] whose P(S > C) is P'."""
        return Cauchy(scores.loc - self.shift * scores.scale, self.factor * scores.scale)

    def shown(self, p: Tensor) -> Tensor:
        """P' for probabilities P [...] float64."""
        if self == UNCHANGED:
            return p
        z = (math.pi * (p - 0.5)).tan()
        return 0.5 + ((z - self.shift) / self.factor).atan() / math.pi


UNCHANGED = WordScale(0.0, 1.0)


@dataclass(frozen=True)
class Intervals:
    """Half-widths of central intervals in scales of Y: quantiles of Y's law times the measured factors.

    factors: level -> a factor for each block of predicted sizes; other levels have factor 1. edges: the loc_Y at which
    the second and later blocks begin, ascending. n: number of held-out numbers behind the factors. bar: the probability
    above which an exact value is written (`heads.candidates.best_bar`). words: how probabilities of words are shown,
    fitted to held-out words. doubts: kind -> the largest doubt of the surest share of held-out answers, for each of
    `SHARES`. Doubt of a word: -log softmax(loc_S), in nats; of a number: scale_Y, in the target's unit.
    word_temperature: `heads.word_temperature`; 1: not measured.
    """

    factors: Mapping[float, Sequence[float]] = field(default_factory=dict)
    n: int = 0
    bar: float = 0.5
    words: WordScale = UNCHANGED
    doubts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    word_temperature: float = 1.0
    edges: Sequence[float] = ()

    def most_doubt(self, kind: str, share: float) -> float:
        """The doubt above which to abstain, so that this share of held-out "words" or "numbers" is answered; inf
        without any. share: 0 to 1."""
        return float(np.interp(share, SHARES, self.doubts[kind])) if self.doubts.get(kind) else math.inf

    def half_width(self, level: float, y: Cauchy) -> Tensor:
        """[...] float64, in scales: the interval is loc -+ half_width scale. Raises ValueError unless 0 < level < 1.

        It contains those of lower levels: few numbers give a factor, often a large one, to the level 0.5 only.
        """
        if not 0.0 < level < 1.0:
            raise ValueError(f"level must be between 0 and 1, found {level}")
        loc, blocks = y.loc.double(), range(len(self.edges) + 1)
        known = {level: [1.0 for _ in blocks]} | {of: each for of, each in self.factors.items() if of <= level}
        widths = [max(each[block] * y.half_width(of) for of, each in known.items()) for block in blocks]
        found = torch.full_like(loc, widths[0])
        for edge, width in zip(self.edges, widths[1:], strict=True):  # scalars only: a graph may capture this
            found = found.masked_fill(loc >= edge, width)
        return found

    def word_draws(self, temperature: float, cut: float) -> tuple[float, float]:
        """(temperature, eps_truncation) of what words read, from those of numbers."""
        if self.word_temperature == 1.0:
            return temperature, cut
        return temperature * self.word_temperature, max(cut, WORD_TAILS)

    def to_dict(self) -> dict[str, Any]:
        """The contents of `calibration.json`."""
        levels = {f"{level:g}": list(each) for level, each in self.factors.items()}
        doubts = {kind: list(each) for kind, each in self.doubts.items() if len(each)}
        words = {"words": self.words._asdict(), "doubts": doubts, "word_temperature": self.word_temperature}
        return {"levels": levels, "edges": list(self.edges), "n": self.n, "bar": self.bar, **words}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> "Intervals":
        """From the result of `to_dict`; an older one has one factor a level, None has none. Raises ValueError for wrong
        types or values."""
        if data is None:
            return cls()
        try:
            factors = {float(level): tuple(map(float, np.atleast_1d(each))) for level, each in data["levels"].items()}
            edges = tuple(map(float, data.get("edges", ())))
            doubts = {kind: [float(each) for each in several] for kind, several in data.get("doubts", {}).items()}
            n, bar = int(data["n"]), float(data.get("bar", cls.bar))
            wide = float(data.get("word_temperature", cls.word_temperature))
            words = WordScale(**{name: float(value) for name, value in data.get("words", UNCHANGED._asdict()).items()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no levels and n in {data}") from error
        odd = any(not 0.0 < of < 1.0 or not all(0.0 <= f < math.inf for f in each) for of, each in factors.items())
        odd |= any(len(each) != len(edges) + 1 for each in factors.values())
        if odd or [*edges] != sorted({*edges}):
            allowed = "levels between 0 and 1, factors >= 0, one more of them than edges, which ascend"
            raise ValueError(f"{allowed}; found {data['levels']} and {edges}")
        _check_words(words, wide)
        if any(len(each) != len(SHARES) for each in doubts.values()):
            raise ValueError(f"{len(SHARES)} doubts of words and of numbers, found {data['doubts']}")
        return cls(factors, n, bar, words, doubts, wide, edges)


def _check_words(words: WordScale, wide: float) -> None:
    if not (math.isfinite(words.shift) and 0.0 < words.factor < math.inf and 0.0 < wide < math.inf):
        found = f"{words._asdict()} and a word_temperature of {wide}"
        raise ValueError(f"words with a finite shift, a factor above 0 and a temperature above 0, found {found}")


def number_interval(y: Cauchy, target: TargetTransform, intervals: Intervals, level: float) -> tuple[Tensor, Tensor]:
    """Ends (low, high) [...] float64, raw unit, of the central interval at a level; y is in the target's unit.

    loc -+ half-width x scale, recalibrated if `intervals` has factors, mapped by the inverse target transform, which is
    monotone. Raises ValueError unless 0 < level < 1.
    """
    reach = intervals.half_width(level, y) * y.scale.double()
    return target.inverse(y.loc.double() - reach), target.inverse(y.loc.double() + reach)
