"""Writes numbers into text so that `data.numbers.find_numbers` reads the same float64 at the same place."""

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import accumulate, pairwise

from cqwen_dist.config.data import NumberPolicy
from cqwen_dist.config.shape import FRACTIONS_BELOW, MOST_SHOWN, PLACES_SHOWN
from cqwen_dist.data.numbers import DEFAULT_POLICY, NumberSpan, find_numbers

_PLAIN_OR_GROUPED = re.compile(r"-?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]+)?")


def in_decimals(value: float) -> str:
    """A number in plain decimals, as the base reads it behind `<NUM>` (`data.keep_digits`): 48, -0.5.

    The shortest exact decimals, six at most; none from 1e9 on, and no characters at all from 1e15 on.
    `heads.numerals.characters` computes the same with tensors.
    """
    size = abs(value)
    if not size < MOST_SHOWN:
        return ""
    places = 0
    while size < FRACTIONS_BELOW and places < PLACES_SHOWN and round(size * 10.0**places) / 10.0**places != size:
        places += 1
    units = str(round(size * 10.0**places)).rjust(places + 1, "0")
    whole = len(units) - places
    return "-" * (value < 0) + units[:whole] + "." * (places > 0) + units[whole:]


@dataclass(frozen=True)
class Habits:
    """How a text writes its numbers (`habits_of`); without arguments: plainly.

    own: the numerals of values that it writes in another form, such as 24.00 and 1,024. grouped: the number of digits
    from which it has groups of three. decimals: of its fractions, as in prices; 0: no habit.
    """

    own: dict[float, str] = field(default_factory=dict)
    grouped: float = math.inf
    decimals: int = 0

    def first(self, value: float, forms: list[str]) -> list[str]:
        """A value's forms (`_forms`) behind the one that the text would choose."""
        whole, dot, decimals = forms[0].partition(".")
        if "e" in forms[0] or not value:  # -0.0 is no 0
            return forms
        if len(whole.lstrip("-")) >= self.grouped:
            whole = f"{int(whole):,}"
        own = self.own.get(value, whole + dot + decimals.ljust(self.decimals * len(dot), "0"))
        return [*dict.fromkeys((own, *forms))]


def habits_of(text: str, policy: NumberPolicy = DEFAULT_POLICY) -> Habits:
    """The habits of a text. Decimals are one if all its fractions have the same number, and one ends with 0 (2.50)."""
    spans = [(span.value, text[span.start : span.end]) for span in find_numbers(text, policy)]
    found = {value: numeral for value, numeral in spans if _PLAIN_OR_GROUPED.fullmatch(numeral)}
    decimals = {len(numeral.partition(".")[2]) for numeral in found.values() if "." in numeral}
    padded = any("." in numeral and numeral.endswith("0") for numeral in found.values())
    return Habits(
        {value: numeral for value, numeral in found.items() if numeral != _forms(value, policy)[0]},
        min((len(f"{abs(int(value))}") for value, numeral in found.items() if "," in numeral), default=math.inf),
        decimals.pop() if padded and len(decimals) == 1 else 0,
    )


def _forms(value: float, policy: NumberPolicy) -> list[str]:
    """Ways to write a finite value, the plainest first. Each reads back as exactly this float64."""
    digits = repr(value)
    exact = Decimal(digits)
    mantissa, exponent = f"{exact:e}".split("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    scientific = f"{mantissa}e{int(exponent)}"
    forms = [digits.removesuffix(".0")]
    if "e" in digits:
        forms = [scientific] if policy.scientific else [f"{exact:f}"]
    if forms[0].lstrip("-").isdecimal():
        forms.append(f"{forms[0]}.0")
    if policy.scientific:
        forms.append(scientific)
        whole, places = mantissa.replace(".", ""), len(mantissa.partition(".")[2])
        forms.append(f"{whole}e{int(exponent) - places}")  # without a dot, for use after a phone number
    if policy.leading_zeros and "e" not in forms[0]:  # after "+", digits may look like a phone number
        sign, plain = ("-", forms[0][1:]) if forms[0][0] == "-" else ("", forms[0])
        forms += [f"{sign}{'0' * zeros}{plain}" for zeros in range(1, 7)]
    if policy.accounting and policy.thousands and value < 0:  # if a minus would read as an operator
        forms.append(f"({-Decimal(digits.removesuffix('.0')):,f})")
    if value < 0:  # if a minus would read as a dash
        forms += [f" {form}" for form in forms]
    return forms


class _Writing:
    """Pieces to join to one text: the possible forms of each piece, and the chosen one.

    open: numbers that have to read back; those that no form makes readable are written in their `plain` form.
    """

    def __init__(self, pieces: Sequence[str | float], policy: NumberPolicy, habits: Habits) -> None:
        self.forms: list[list[str]] = []
        self.texts = [isinstance(piece, str) for piece in pieces]
        self.open = {i for i, piece in enumerate(pieces) if not isinstance(piece, str) and math.isfinite(piece)}
        for i, piece in enumerate(pieces):
            forms = habits.first(float(piece), _forms(float(piece), policy)) if i in self.open else [str(piece)]
            follows = i > 0 and not self.texts[i] and not self.texts[i - 1]
            self.forms.append([f" {form}" for form in forms] if follows else forms)
        self.chosen = [0] * len(pieces)
        self.plain: dict[int, int] = {}

    def written(self) -> list[str]:
        """Each piece in its chosen form."""
        return [forms[k] for forms, k in zip(self.forms, self.chosen, strict=True)]

    def wrong(self, spans: list[NumberSpan]) -> int | None:
        """The first number that is not read at its place, or else the first next to a text that is misread as a number.

        A different form may prevent that. The text may precede the number ("555-123-" and 4567.0) or follow it
        ("(1,234)" and "x5"). spans: numbers read from the joined pieces.
        """
        written, ends = self.written(), {span.start: span.end for span in spans if math.isfinite(span.value)}
        places = list(pairwise(accumulate(map(len, written), initial=0)))
        for i, (start, end) in enumerate(places):
            if i in self.open and ends.get(start + written[i].startswith(" ")) != end:
                return i
        starts = list(ends)
        for i, (start, end) in enumerate(places):
            if self.texts[i] and bisect_left(starts, start) < bisect_left(starts, end):
                for beside in (range(i + 1, len(places)), range(i - 1, -1, -1)):
                    near = next((j for j in beside if not self.texts[j]), None)
                    if near in self.open:
                        self.plain.setdefault(near, self.chosen[near])
                        return near
        return None


def write_numbers(
    pieces: Sequence[str | float], policy: NumberPolicy = DEFAULT_POLICY, habits: Habits | None = None
) -> str:
    """Join texts and numbers to one text in which `find_numbers` finds the same numbers at the same places.

    Numbers are written plainly, or with `habits`, unless that would be misread: 100 before ",456" becomes 100.0,
    13812345678 (like a phone number) gets ".0" or an exponent, and consecutive numbers get a space between them. NaN
    and infinities become "nan", "inf" and "-inf", which `find_numbers` ignores. Pieces that cannot be written so (a
    numeral in a text, next to a number) are written plainly.
    """
    pieces = [piece for piece in pieces if piece != ""]  # "" would hide that two numbers meet
    writing = _Writing(pieces, policy, habits or Habits())
    while True:
        text = "".join(writing.written())
        # Read the text back and change one form at a time. Each number has finitely many forms, so this ends.
        wrong = writing.wrong(find_numbers(text, policy))
        if wrong is None:
            return text
        # The number's next form; after the last one, its plain form for good
        writing.chosen[wrong] += 1
        if writing.chosen[wrong] == len(writing.forms[wrong]):
            writing.chosen[wrong] = writing.plain.get(wrong, 0)
            writing.open.remove(wrong)
