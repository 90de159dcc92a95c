"""The numbers of a generation: values, uncertainty, and written digits.

Shape letters: B rows, T' positions of prompt and continuation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cqwen_dist.config.errors import UserError
from cqwen_dist.heads.intervals import LEVELS, Intervals, number_interval
from cqwen_dist.heads.number_head import Decision
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.ops.cauchy import Cauchy

MOST_DIGITS = 17  # enough for any float64
TENS = 308  # the largest power of ten of a float64
POWERS = torch.tensor([float(f"1e{k}") for k in range(-TENS, TENS + 1)], dtype=torch.float64, device="cpu")
Digits = int | Literal["auto"]


@dataclass(frozen=True)
class GeneratedNumbers:
    """The numbers of prompt and continuation, aligned with the ids."""

    values: Tensor  # [B,T'] float64, raw unit, as fed back to the model; 0 at text
    generated: Tensor  # [B,T'] bool: the model wrote a number here
    loc: Tensor  # [B,T'] float64, location of Y in the target's unit; 0 if not generated
    scale: Tensor  # [B,T'] float64, scale of Y; 0 if not generated
    p_num: Tensor  # [B,T'] float64, P of <NUM> at the position; nan in the prompt and after the end
    p_word: Tensor  # [B,T'] float64, P of the written word; nan as p_num
    given: Tensor  # [B,T'] bool: a character of the number before it, not chosen (`data.keep_digits`)
    abstained: Tensor  # [B,T'] bool: too doubtful a word or number (`Settings.abstain`); the text ends before it
    # [B,T',4] float64: parts of scale_S of the word and of scale_Y, each from the individual and from the noise
    parts: Tensor
    target: TargetTransform
    intervals: Intervals = field(default_factory=Intervals)
    which: Tensor | None = None  # [B,T'] int64: which of `names` was written, with all its digits; -1: none of them
    names: Sequence[str] = ()  # the head's

    def until(self, end: int | None, begin: int = 0) -> GeneratedNumbers:
        """The positions before `end` (None: all), from `begin` on, as views."""
        at = slice(begin, end)
        cut: dict[str, Any] = {name: value[:, at] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **cut)

    def clone(self) -> GeneratedNumbers:
        """A copy in new memory."""
        own: dict[str, Any] = {name: value.clone() for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **own)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """(low, high), each [B,T'] float64 in the raw unit, by `number_interval`; nan if not generated."""
        low, high = number_interval(self.target.kind(self.loc, self.scale), self.target, self.intervals, level)
        return low.where(self.generated, math.nan), high.where(self.generated, math.nan)

    def written(self, row: int, position: int, digits: Digits = "auto") -> float:
        """The value in the text (`shown`). A prompt number has no spread; an exact one is not rounded."""
        if self.source(row, position) is not None:
            return float(self.values[row, position])
        spread = 0.0
        if digits == "auto" and bool(self.generated[row, position]):
            low, high = number_interval(self._law(row, position), self.target, self.intervals, 0.5)
            spread = float(high - low) / 2
        return shown(float(self.values[row, position]), spread, digits)

    def record(self, row: int, position: int, digits: Digits = "auto") -> NumberRecord | None:
        """The record of a generated number; None at other positions."""
        if not bool(self.generated[row, position]):
            return None
        source, y = self.source(row, position), self._law(row, position)
        ends = {f"{level:g}": number_interval(y, self.target, self.intervals, level) for level in LEVELS}
        return NumberRecord(
            value=float((self.values if source else self.target.inverse(self.loc))[row, position]),
            written=self.written(row, position, digits),
            intervals={level: (float(low), float(high)) for level, (low, high) in ends.items()},
            p_num=float(self.p_num[row, position]),
            source=source,
            individual=float(self.parts[row, position, 2]),
            noise=float(self.parts[row, position, 3]),
        )

    def records(self, row: int = 0, digits: Digits = "auto") -> list[NumberRecord]:
        """The records of all generated numbers of a row, in order."""
        found = (self.record(row, position, digits) for position in range(self.values.shape[1]))
        return [each for each in found if each is not None]

    def source(self, row: int, position: int) -> str | None:
        """The name of an exact number, such as "the last number"; None for a location of Y."""
        which = -1 if self.which is None else int(self.which[row, position])
        return None if which < 0 else self.names[which]

    def _law(self, row: int, position: int) -> Cauchy:
        return self.target.kind(self.loc[row, position], self.scale[row, position])


@dataclass(frozen=True)
class NumberRecord:
    """A generated number, in the raw unit."""

    value: float  # loc_Y
    written: float  # the value in the text, as fed back to the model
    intervals: dict[str, tuple[float, float]]  # level -> (low, high)
    p_num: float  # P(<NUM>) at the position
    source: str | None = None  # the name of an exact number; None for a location of Y
    individual: float = math.nan  # scale_Y, in the target's unit, from the individual: |w| scale_U
    noise: float = math.nan  # and from the noise: |w| |b_noise|

    def __str__(self) -> str:
        """The written value and its 90 % interval, rounded by the uncertainty."""
        low, high = self.intervals["0.5"]
        ends = (shown(end, (high - low) / 2) for end in self.intervals["0.9"])
        return "{:.15g}, with 90 % between {:.15g} and {:.15g}".format(self.written, *ends)


def shown(value: float, spread: float, digits: Digits = "auto") -> float:
    """A value rounded to its meaningful digits.

    digits "auto": down to the second digit of `spread` (half the 50 % interval, raw unit), as for measurements. The
    first digit is always kept, even for a larger spread. A spread of 0 keeps all digits.
    digits as a number: this many significant digits. Raises `UserError` below 1 or above 17.
    """
    if digits != "auto":
        check_digits(digits)
    both = torch.tensor([value, spread], dtype=torch.float64)
    return float(rounded(both[0], both[1], digits, POWERS))


def written_values(
    decision: Decision, target: TargetTransform, intervals: Intervals, digits: Digits | None, powers: Tensor
) -> Tensor:
    """The values [...] float64 that a text gets for these decisions, on the device of `powers` (`POWERS`): locations of
    Y, rounded to `digits` (None: not rounded), or exact values."""
    y = decision.y.to(powers.device)
    value = target.inverse(y.loc)
    if digits == "auto":
        low, high = number_interval(y.to(torch.float64), target, intervals, 0.5)
        value = rounded(value, (high - low) / 2, digits, powers)
    elif digits is not None:
        value = rounded(value, value, digits, powers)
    exact = None if decision.exact is None else decision.exact.to(powers.device)
    return value if exact is None else exact.where(~exact.isnan(), value)


def rounded(values: Tensor, spreads: Tensor, digits: Digits, powers: Tensor) -> Tensor:
    """`shown` for values and spreads [...] float64 on their device, without host synchronisation.

    powers: `POWERS` on this device. The result equals the float of Python's "g" format (up to 15 digits and 1e+-22;
    beyond, within a unit in the last place): an integer times a power of ten. If both are exact, one product or
    quotient gives the float64 nearest to the text.
    """
    sizes = torch.stack([values.abs(), spreads])
    first, last = torch.bucketize(sizes, powers, right=True) - (TENS + 1)  # powers of ten, exact as no logarithm is
    fine = (sizes > 0.0) & (sizes < math.inf)
    if digits == "auto":
        kept, fine = (first - last + 2).clamp(1, MOST_DIGITS), fine.all(0)
    else:
        kept, fine = torch.full_like(first, digits), fine[0]
    unit = first - kept + 1
    up, down = tens = powers[torch.stack([-unit, unit]).clamp(0, TENS) + TENS]
    units = values * up / down
    # An exact half here may be a rounding artefact: decide by the exact sign of values * up - units * down
    products, off = _exact_product(torch.stack([values, units]), tens)
    side = (products[0] - products[1]) - (off[0] - off[1])
    half = (units.frac().abs() == 0.5) & (side.abs() > 0)
    found = torch.where(half, units + side.sign() / 2, units.round()) * down / up
    return torch.where(fine & (kept < MOST_DIGITS) & (unit >= -TENS), found, values)


def _exact_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """p = fl(a b), and p - a b for float64, exactly (Dekker 1971, "A floating-point technique for extending the
    available precision", with Veltkamp's splitting); nan or inf if the splitting overflows."""
    p, both = a * b, torch.stack([a, b])
    large = both * 134217729.0
    high = large - (large - both)
    (a1, b1), (a2, b2) = high, both - high
    return p, p.addcmul(a1, b1, value=-1).addcmul(a1, b2, value=-1).addcmul(a2, b1, value=-1).addcmul(a2, b2, value=-1)


def check_digits(digits: Digits) -> None:
    """Raises `UserError` unless "auto" or 1 to 17."""
    if digits != "auto" and not (isinstance(digits, int) and 1 <= digits <= MOST_DIGITS):
        raise UserError("digits", digits, f"auto, or 1 to {MOST_DIGITS}")


def empty_numbers(values: Tensor, head: Any, intervals: Intervals) -> GeneratedNumbers:
    """Buffers for a generation; values [B,T'] has the prompt's values. head: the model's `NumberHead`."""
    own: dict[str, Any] = {name: torch.zeros_like(values) for name in ("loc", "scale")}
    own |= {name: torch.full_like(values, math.nan) for name in ("p_num", "p_word")}
    own |= {name: torch.zeros_like(values, dtype=torch.bool) for name in ("generated", "given", "abstained")}
    own["parts"] = values.new_full((*values.shape, 4), math.nan)
    own["which"] = torch.full_like(values, -1, dtype=torch.int64) if head.exact else None
    return GeneratedNumbers(values, target=head.target, intervals=intervals, names=head.names, **own)
