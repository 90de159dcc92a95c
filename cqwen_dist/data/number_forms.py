"""How a column writes its numbers: the decimal sign and a unit. One reader, for all files and all verbs.

A form is written as an example: `1234.5`, `1234,5 €`, `$1234.5`, `1234.5%`. In each, thousands may be grouped by the
other sign, by spaces or by apostrophes, a number may have a sign before or after it, and brackets mean a minus.

A column has one form, chosen from all cells looked at. 962 and 1.238 have two readings, so the user is asked.
"""

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from cqwen_dist.data.numbers import is_held

# Cells of a column of numbers without a number
_INFINITIES = {sign + word for sign in ("", "+", "-") for word in ("inf", "Inf", "Infinity")}
EMPTY_MARKS = frozenset({"?", "-", "--", "–", "—", ".", "…", "...", *_INFINITIES})
_TO_ASCII = str.maketrans("−–—﹣－＋．，％０１２３４５６７８９", "-----+.,%0123456789")
_SPACES = " \u00a0\u2007\u2009\u202f"
_CURRENCY = "$€£¥₩₹₽₺₪฿₫₴₦₱￥＄￡"
_CODES = "EUR|USD|GBP|CHF|JPY|CNY|RMB|INR|AUD|CAD|NZD|SEK|NOK|DKK|PLN|CZK|HUF|RUB|TRY|BRL|MXN|ZAR|KRW|SGD|HKD|Rs|kr|Fr"
_BEFORE = rf"(?:[A-Z]{{0,3}}[{_CURRENCY}]|(?:{_CODES})\.?)"
_WORD = r"[^\s\d()]{0,11}[23]?"
_AFTER = rf"(?:[{_CURRENCY}%‰°]|[^\W\d_]){_WORD}(?: [^\W\d_]{_WORD})?"
_SHORT = r"[%‰kKMBT千万萬亿億兆천만억조]|[BbMm]n|MM|mln|(?:Mio|Mrd|Tsd|Cr)\.?"
_LONG = r"(?i:thousand|tausend|(?:m|b|tr)illi(?:on|ard)(?:en?)?|lakh|lac|crore|dozen|hundred)s?"
SCALES = re.compile(rf"(?:{_SHORT}|{_LONG})(?:[{_CURRENCY}]| .*)?")
_EXAMPLE = re.compile(rf"(?P<before>{_BEFORE})?\s*1234(?P<decimal>[.,])5\s*(?P<after>{_AFTER})?")


def _cell_pattern(decimal: str) -> re.Pattern[str]:
    group, point = re.escape("." if decimal == "," else ","), re.escape(decimal)
    grouped = "|".join(rf"[1-9][0-9]{{0,2}}(?:{sign}[0-9]{{3}})+" for sign in (group, f"[{_SPACES}]", "['’]"))
    indian = rf"[1-9][0-9]?(?:{group}[0-9]{{2}})+{group}[0-9]{{3}}"
    number = rf"(?:(?:{grouped}|{indian}|[0-9]+)(?:{point}(?:--?|[0-9]*))?|{point}[0-9]+)(?:[eE][+-]?[0-9]+)?"
    return re.compile(
        rf"(?P<first>[+-]?)\s*(?P<before>{_BEFORE})?\s*(?P<second>[+-]?)(?P<number>{number})"
        rf"\s*(?P<after>{_AFTER})?\s*(?P<last>-?)"
    )


_CELLS = {decimal: _cell_pattern(decimal) for decimal in ".,"}
_PHONE = re.compile(r"\s*[+＋][0-9](?: ?[0-9]){9,14}\s*")
_GROUPS = re.compile(rf"[{_SPACES}'’]")
_OTHER = {".": ",", ",": "."}


class Form(NamedTuple):
    """A way to write numbers. unit: a currency, a percent sign or any unit; before: it stands before the number."""

    decimal: str = "."
    unit: str = ""
    before: bool = False

    @classmethod
    def of(cls, example: str) -> "Form":
        """The form of an example such as `1234,5 €`. Raises ValueError."""
        found = _EXAMPLE.fullmatch(example.strip())
        if found is None or (found["before"] and found["after"]):
            raise ValueError(f"{example!r} is no number like 1234.5, 1234,5 € or $1234.5")
        return cls(found["decimal"], found["before"] or found["after"] or "", bool(found["before"]))

    def __str__(self) -> str:
        number = f"1234{self.decimal}5"
        close = self.unit[-1:] in _CURRENCY if self.before else self.unit in ("", "%")
        space = "" if close else " "
        return f"{self.unit}{space}{number}" if self.before else f"{number}{space}{self.unit}"

    @property
    def scales(self) -> bool:
        """Whether the unit changes the number's size, as % and k do and € does not."""
        return SCALES.fullmatch(self.unit) is not None

    def read(self, cell: str, names: bool = False) -> str | None:
        """The plain numeral of a cell; None if its form differs. names: take 007 as 7, which else is a name."""
        found = _parsed(cell, self.decimal)
        if found is None or (found[2] and not names):
            return None
        numeral, unit, _ = found
        # A number without the unit counts as one with it, but 0.5 is not 0.5 %, and 950 not 950k.
        return numeral if unit == self.unit or (not unit and not self.scales) else None

    def other_reads(self, cell: str) -> bool:
        """Whether the cell is a number with the other decimal sign only, or lacks a unit that scales it."""
        own = _parsed(cell, self.decimal)
        if own is None:
            return _parsed(cell, _OTHER[self.decimal]) is not None
        return self.scales and not own[1]

    def option_for(self, cell: str) -> str:
        """The option of `predict` that reads a cell with the other decimal sign, ", or ..."; "" for other cells."""
        is_other = _parsed(cell, self.decimal) is None and _parsed(cell, _OTHER[self.decimal]) is not None
        return f", or predict's --{'no-' * (self.decimal == ',')}decimal-comma" * is_other


class Unsettled(Exception):
    """A column has two readings. Args: the column, some of its cells, a cell's number with a point and with a comma."""


def numeral(text: str) -> str:
    """One text for one number: 12.50 is 12.5, 5.0 is 5, 1e3 is 1000, -0.0 is 0. Whole numbers keep all digits."""
    bare = text.removeprefix("-")
    if bare.isdecimal():
        digits = bare.lstrip("0")
        return text[: len(text) - len(bare)] + digits if digits else "0"
    value = float(text) or 0.0
    return repr(value).removesuffix(".0") if math.isfinite(value) else text


def _parsed(cell: str, decimal: str) -> tuple[str, str, bool] | None:
    """(plain numeral, unit, whether it is a name) of a cell; None if it is no number with this decimal sign.

    Names have leading zeros, or digits that float64 does not hold.
    """
    plain = cell.strip().translate(_TO_ASCII)
    negative = False
    if plain.endswith(")") and plain.count("(") == 1:
        negative, plain = True, plain[:-1].replace("(", "")
    found = _CELLS[decimal].fullmatch(plain)
    if found is None or (found["before"] and found["after"]):
        return None
    signs = found["first"] + found["second"] + found["last"]
    if len(signs) + negative > 1:
        return None
    digits = _GROUPS.sub("", found["number"]).replace(_OTHER[decimal], "").replace(decimal, ".").rstrip("-")
    bare = re.split("[.eE]", digits)[0]
    is_name = (len(bare) > 1 and bare.startswith("0")) or not is_held(digits)
    minus = "-" if negative or signs == "-" else ""
    return numeral(minus + digits), found["before"] or found["after"] or "", is_name


class _Readings(NamedTuple):
    """The ways to read a column's cells as numbers."""

    units: dict[str, tuple[str, bool] | None]  # by decimal sign: the unit, whether it stands first; None: no fit
    twofold: list[tuple[str, str, str]]  # cells with two readings, and these
    sign: str  # the sign in those cells
    whole: str  # a cell without any sign; "" if there is none


@lru_cache(maxsize=1 << 16)
def _both(cell: str) -> tuple[tuple[str, str, bool] | None, tuple[str, str, bool] | None]:
    return _parsed(cell, "."), _parsed(cell, ",")


def _readings(cells: Iterable[str], names: bool) -> _Readings:
    both = {cell: _both(cell) for cell in {cell.strip() for cell in cells} - EMPTY_MARKS}
    sides = {".": {cell: a for cell, (a, _) in both.items()}, ",": {cell: b for cell, (_, b) in both.items()}}
    units = {decimal: _unit_of(side, names) for decimal, side in sides.items()}
    twofold = [(c, a[0], b[0]) for c, (a, b) in both.items() if a is not None and b is not None and a[0] != b[0]]
    sign = next((s for s in ".," for c, *_ in twofold if s in c), "")
    whole = next((cell for cell in sorted(both) if not {".", ","} & {*cell}), "")
    return _Readings(units, sorted(twofold), sign, whole)


def _unit_of(parsed: Mapping[str, tuple[str, str, bool] | None], names: bool) -> tuple[str, bool] | None:
    """The unit of cells and whether it stands first; None if not all are numbers with the same unit."""
    if not parsed or not all(one is not None and (names or not one[2]) for one in parsed.values()):
        return None
    if not names and all(map(_PHONE.fullmatch, parsed)):
        return None
    named = {one[1] for one in parsed.values() if one is not None}
    kinds = named - {""}
    if len(kinds) > 1 or ("" in named and any(map(SCALES.fullmatch, kinds))):
        return None
    unit = next(iter(kinds), "")
    return unit, any(re.match(rf"[+(-]*\s*{re.escape(unit)}", cell) for cell in parsed if unit)


def forms_of(
    columns: Mapping[str, Iterable[str]],
    *,
    typed: Iterable[str] = (),
    delimiter: str = ",",
    decimal_comma: bool | None = None,
    target: str | None = None,
) -> dict[str, Form]:
    """The form of each column whose cells are all numbers.

    columns: the cells that are not empty. typed: columns that the file stores as numbers. delimiter: of the
    file; "," also for other kinds. decimal_comma: settles cells with two readings. target: may have names.
    Raises `Unsettled`.
    """
    typed = {*typed}
    found = {name: _readings(cells, name == target) for name, cells in columns.items() if name not in typed}
    signs = {d for own in found.values() for d in ".," if own.units[d] and not own.units[_OTHER[d]]}
    forms: dict[str, Form | None] = {name: Form() for name in columns if name in typed}
    forms |= {name: _form_of(name, own, signs, delimiter, decimal_comma) for name, own in found.items()}
    return {name: form for name in columns if (form := forms[name]) is not None}


def _form_of(name: str, own: _Readings, signs: set[str], delimiter: str, comma: bool | None) -> Form | None:
    fitting = [decimal for decimal in ".," if own.units[decimal] and (comma is not False or decimal == ".")]
    if not fitting:
        return None
    decimal = fitting[0]
    if len(fitting) == 2 and own.twofold:
        decimal = "," if comma else _settled(name, own, signs, delimiter)
    return Form(decimal, *(own.units[decimal] or ()))


def _settled(name: str, own: _Readings, signs: set[str], delimiter: str) -> str:
    """The decimal sign of cells such as 1.238. signs: those that other columns of the file certainly have.

    A sign that always stands before three digits separates thousands or decimals. Commas in an English file separate
    thousands. Points there are decimals, unless whole numbers occur too: 962 and 1.238 are 962 and 1238, or not.
    """
    english = delimiter == "," if not signs else signs == {"."}
    foreign = signs == {","}
    if english and (own.sign == "," or (own.sign == "." and not own.whole)):
        return "."
    if foreign and (own.sign == "." or (own.sign == "," and not own.whole)):
        return ","
    cell, point, comma = own.twofold[0]
    shown = f"{own.whole} and {cell}" if own.whole else cell
    raise Unsettled(name, shown, point, comma)


def by_form(forms: Mapping[str, Form]) -> dict[str, list[str]]:
    """`data.number_columns`: the columns of each form."""
    found: dict[str, list[str]] = {}
    for name, form in forms.items():
        found.setdefault(str(form), []).append(name)
    return found


def said(forms: Mapping[str, Form]) -> str:
    """The forms in one line, for people."""
    parts = [f"as {form} in {', '.join(names)}" for form, names in by_form(forms).items()]
    return f"numbers: {'; '.join(parts)} (data.number_columns)" if parts else "numbers: in no column"
