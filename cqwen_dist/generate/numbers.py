"""The numbers of a generation: values, their uncertainty, and how many of their digits are worth writing.

Letters: B rows, T' positions of prompt and continuation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from cqwen_dist.config import UserError
from cqwen_dist.intervals import LEVELS, Intervals
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.targets import TargetTransform

MOST_DIGITS = 17  # of a float64: all of it
Digits = int | Literal["auto"]


def number_interval(y: Cauchy, target: TargetTransform, intervals: Intervals, level: float) -> tuple[Tensor, Tensor]:
    """(low, high) [...] float64, raw unit: the central interval of Y (in the target's unit) at a level.

    loc -+ half-width x scale, recalibrated where the model knows how, through the inverse of the target transform
    (monotone, so the ends stay quantiles). Raises ValueError unless 0 < level < 1.
    """
    reach = intervals.half_width(level) * y.scale.double()
    return target.inverse(y.loc.double() - reach), target.inverse(y.loc.double() + reach)


@dataclass(frozen=True)
class GeneratedNumbers:
    """What goes with the ids of prompt and continuation, aligned with them."""

    values: Tensor  # [B,T'] float64, raw unit, as the model reads them; 0 at text
    generated: Tensor  # [B,T'] bool: a number that the model wrote
    loc: Tensor  # [B,T'] float64, location of Y in the target's unit; 0 where not generated
    scale: Tensor  # [B,T'] float64, its scale; 0 where not generated
    p_num: Tensor  # [B,T'] float64, P of <NUM> when the position was written; nan in the prompt and behind the end
    p_word: Tensor  # [B,T'] float64, P of the word that was written; nan as p_num
    target: TargetTransform
    intervals: Intervals = field(default_factory=Intervals)
    types: list[str] | None = None  # names of the types of number
    kinds: Tensor | None = None  # [B,T'] int64: which of them, where generated
    more_values: list[str] | None = None  # names of further values
    more: Cauchy | None = None  # [B,T',R-1] float64: their laws in the target's unit, where generated

    def until(self, end: int) -> GeneratedNumbers:
        """The first `end` positions, as views."""
        names = ("values", "generated", "loc", "scale", "p_num", "p_word")
        return replace(
            self,
            **{name: getattr(self, name)[:, :end] for name in names},
            kinds=None if self.kinds is None else self.kinds[:, :end],
            more=None if self.more is None else Cauchy(self.more.loc[:, :end], self.more.scale[:, :end]),
        )

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """(low, high), each [B,T'] float64 in the raw unit, as `number_interval`; nan where not generated."""
        low, high = number_interval(Cauchy(self.loc, self.scale), self.target, self.intervals, level)
        return low.where(self.generated, math.nan), high.where(self.generated, math.nan)

    def written(self, row: int, position: int, digits: Digits = "auto") -> float:
        """The value as it is written in the text (`shown`)."""
        value = float(self.values[row, position])
        if digits != "auto" or not bool(self.generated[row, position]):
            return value if digits == "auto" else shown(value, 0.0, digits)
        y = Cauchy(self.loc[row, position], self.scale[row, position])
        low, high = number_interval(y, self.target, self.intervals, 0.5)
        return shown(value, float(high - low) / 2, "auto")

    def record(self, row: int, position: int, digits: Digits = "auto") -> NumberRecord | None:
        """All that is known of a number that the model wrote; None of anything else."""
        if not bool(self.generated[row, position]):
            return None
        y = Cauchy(self.loc[row, position], self.scale[row, position])
        more = {}
        for i, name in enumerate(self.more_values or ()):
            assert self.more is not None
            law = Cauchy(self.more.loc[row, position, i], self.more.scale[row, position, i])
            more[name] = FurtherValue(float(self.target.inverse(law.loc)), self._spans(law, Intervals()))
        return NumberRecord(
            value=float(self.target.inverse(self.loc[row, position])),
            written=self.written(row, position, digits),
            intervals=self._spans(y, self.intervals),
            p_num=float(self.p_num[row, position]),
            type=None if self.types is None or self.kinds is None else self.types[int(self.kinds[row, position])],
            more=more,
        )

    def records(self, row: int = 0, digits: Digits = "auto") -> list[NumberRecord]:
        """`record` of each number that the model wrote in a row, in their order."""
        found = (self.record(row, position, digits) for position in range(self.values.shape[1]))
        return [each for each in found if each is not None]

    def _spans(self, y: Cauchy, intervals: Intervals) -> dict[str, tuple[float, float]]:
        found = {f"{level:g}": number_interval(y, self.target, intervals, level) for level in LEVELS}
        return {level: (float(low), float(high)) for level, (low, high) in found.items()}


@dataclass(frozen=True)
class FurtherValue:
    """A further value of a number (S4 4.7.1), raw unit; its intervals are the Cauchy's own: only the first value's are
    recalibrated."""

    value: float
    intervals: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class NumberRecord:
    """A number the model wrote, in the raw unit. value: loc_Y.

    written: as it stands in the text, which is also what the model reads on. intervals: level -> (low, high). p_num:
    P(<NUM>) at its position. type: the likeliest, where the model has types. more: further values by name.
    """

    value: float
    written: float
    intervals: dict[str, tuple[float, float]]
    p_num: float
    type: str | None = None
    more: dict[str, FurtherValue] = field(default_factory=dict)

    def __str__(self) -> str:
        """As it is written, and its 90 % interval to the digits that its uncertainty leaves."""
        low, high = self.intervals["0.5"]
        ends = (shown(end, (high - low) / 2) for end in self.intervals["0.9"])
        return "{:.15g}, with 90 % between {:.15g} and {:.15g}".format(self.written, *ends)


def shown(value: float, spread: float, digits: Digits = "auto") -> float:
    """A value with the digits that mean something.

    digits "auto": two digits of `spread` (half the 50 % interval, raw unit) and no further, as measurements are
    written, but at least the value's first digit, and all of it where the spread is 0; a number: so many significant
    digits. Raises `UserError` for digits below 1 or beyond a float64's 17.
    """
    if digits != "auto":
        check_digits(digits)
        return float(f"{value:.{digits}g}")
    if value == 0.0 or not math.isfinite(value) or not math.isfinite(spread) or spread <= 0.0:
        return value
    first, last = math.floor(math.log10(abs(value))), math.floor(math.log10(spread)) - 1
    if last > first:  # the spread swallows the value: its first digit, or nothing
        return float(f"{value:.1g}")
    return float(f"{value:.{min(first - last + 1, MOST_DIGITS)}g}")


def check_digits(digits: Digits) -> None:
    """Raises `UserError` unless "auto" or 1 to 17."""
    if digits != "auto" and not (isinstance(digits, int) and 1 <= digits <= MOST_DIGITS):
        raise UserError("digits", digits, f"auto, or 1 to {MOST_DIGITS}")


def empty_numbers(
    values: Tensor,
    target: TargetTransform,
    intervals: Intervals,
    types: list[str] | None = None,
    more_values: list[str] | None = None,
) -> GeneratedNumbers:
    """Of a prompt's values [B,T'], to be filled as positions are written. types, more_values: the model's names."""
    zeros, unknown = torch.zeros_like(values), torch.full_like(values, math.nan)
    return GeneratedNumbers(
        values,
        torch.zeros_like(values, dtype=torch.bool),
        zeros,
        zeros.clone(),
        unknown,
        unknown.clone(),
        target,
        intervals,
        types,
        torch.zeros_like(values, dtype=torch.int64) if types else None,
        more_values,
        Cauchy(*(values.new_zeros(*values.shape, len(more_values)) for _ in range(2))) if more_values else None,
    )
