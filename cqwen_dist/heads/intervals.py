"""What held-out texts have calibrated: the widths of intervals around numbers, the bar of exact numbers, the
probabilities of words, how doubtful an answer may be, and how wide individuals are drawn for words. An interval is
quantiles of its law, times measured factors if any.

A Cauchy fitted to light-tailed errors is too wide at 90 %; `number_metrics` measures the factor on held-out numbers. A
run stores the factors with its metrics, an exported folder in `calibration.json`:
{"levels": {"0.5": f, "0.9": f, "0.95": f}, "n": n, "bar": p, "words": {"shift": s, "factor": f}, "doubts":
{"words": [...], "numbers": [...]}, "word_temperature": t}.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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

    factors: level -> factor; other levels have factor 1. n: number of held-out numbers behind the factors. bar: the
    probability above which an exact value is written (`heads.candidates.best_bar`). words: how probabilities of words
    are shown, fitted to held-out words. doubts: kind -> the largest doubt of the surest share of held-out answers, for
    each of `SHARES`. Doubt of a word: -log softmax(loc_S), in nats; of a number: scale_Y, in the target's unit.
    word_temperature: `heads.word_temperature`; 1: not measured.
    """

    factors: Mapping[float, float] = field(default_factory=dict)
    n: int = 0
    bar: float = 0.5
    words: WordScale = UNCHANGED
    doubts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    word_temperature: float = 1.0

    def most_doubt(self, kind: str, share: float) -> float:
        """The doubt above which to abstain, so that this share of held-out "words" or "numbers" is answered; inf
        without any. share: 0 to 1."""
        return float(np.interp(share, SHARES, self.doubts[kind])) if self.doubts.get(kind) else math.inf

    def half_width(self, level: float, law: type[Cauchy] = Cauchy) -> float:
        """In scales: the interval is loc_Y -+ half_width * scale_Y. law: of Y. Raises ValueError unless 0 < level < 1.

        It contains those of lower levels: few numbers give a factor, often a large one, to the level 0.5 only.
        """
        if not 0.0 < level < 1.0:
            raise ValueError(f"level must be between 0 and 1, found {level}")
        factors = {level: 1.0} | {known: factor for known, factor in self.factors.items() if known <= level}
        return max(factor * law.half_width(known) for known, factor in factors.items())

    def word_draws(self, temperature: float, cut: float) -> tuple[float, float]:
        """(temperature, eps_truncation) of what words read, from those of numbers."""
        if self.word_temperature == 1.0:
            return temperature, cut
        return temperature * self.word_temperature, max(cut, WORD_TAILS)

    def to_dict(self) -> dict[str, Any]:
        """The contents of `calibration.json`."""
        levels = {f"{level:g}": f for level, f in self.factors.items()}
        doubts = {kind: list(each) for kind, each in self.doubts.items() if len(each)}
        words = {"words": self.words._asdict(), "doubts": doubts, "word_temperature": self.word_temperature}
        return {"levels": levels, "n": self.n, "bar": self.bar, **words}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> "Intervals":
        """From the result of `to_dict`; None gives no factors. Raises ValueError for wrong types or values."""
        if data is None:
            return cls()
        try:
            factors = {float(level): float(f) for level, f in data["levels"].items()}
            doubts = {kind: [float(each) for each in several] for kind, several in data.get("doubts", {}).items()}
            n, bar = int(data["n"]), float(data.get("bar", cls.bar))
            wide = float(data.get("word_temperature", cls.word_temperature))
            words = WordScale(**{name: float(value) for name, value in data.get("words", UNCHANGED._asdict()).items()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no levels and n in {data}") from error
        if any(not 0.0 < level < 1.0 or not (f >= 0.0 and math.isfinite(f)) for level, f in factors.items()):
            raise ValueError(f"levels between 0 and 1 with factors >= 0, found {data['levels']}")
        _check_words(words, wide)
        if any(len(each) != len(SHARES) for each in doubts.values()):
            raise ValueError(f"{len(SHARES)} doubts of words and of numbers, found {data['doubts']}")
        return cls(factors, n, bar, words, doubts, wide)


def _check_words(words: WordScale, wide: float) -> None:
    if not (math.isfinite(words.shift) and 0.0 < words.factor < math.inf and 0.0 < wide < math.inf):
        found = f"{words._asdict()} and a word_temperature of {wide}"
        raise ValueError(f"words with a finite shift, a factor above 0 and a temperature above 0, found {found}")


def read_intervals(folder: Path) -> Intervals:
    """Read `calibration.json` of a folder; no factors without a file. Raises ValueError for a broken file."""
    path = folder / FILE
    return Intervals.from_dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else Intervals()


def number_interval(y: Cauchy, target: TargetTransform, intervals: Intervals, level: float) -> tuple[Tensor, Tensor]:
    """Ends (low, high) [...] float64, raw unit, of the central interval at a level; y is in the target's unit.

    loc -+ half-width x scale, recalibrated if `intervals` has factors, mapped by the inverse target transform, which is
    monotone. Raises ValueError unless 0 < level < 1.
    """
    reach = intervals.half_width(level, type(y)) * y.scale.double()
    return target.inverse(y.loc.double() - reach), target.inverse(y.loc.double() + reach)
