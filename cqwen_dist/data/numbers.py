"""Numerals in text: which ones are numbers, what they are worth, and how a number is written back.

The seeds ask for "detect, replace by <NUM>, keep the value" (seed S0 1.1) and leave the rest open.
The policy, by default (`NumberPolicy` switches the parts marked [..]):

Numbers
- integers and decimals: 48, 3.14, .5 (= 0.5; not behind a letter, digit or dot); a dot that ends a sentence
  is no part: "1." is 1. European decimal commas and dots as thousands are not read.
- [thousands] 1,234,567.5: groups of exactly three behind a first group of one to three without leading zero.
  "1,23" is two numbers, and so is "1234,567". A list without spaces ("100,200") cannot be told apart: one number.
  Also 1 234 567 with no-break or thin spaces; with plain ones where a group begins with 0, as no number of its own
  does: 80 000, 5 650 000 (but "5 650" is two numbers). So the list "100 000 200 000" is one number.
- [accounting, off] (1,234) is -1234: brackets directly around a numeral with thousands, as balance sheets write; not
  (12), which is as often a remark, nor behind a letter, a digit or a closing bracket. Off, the brackets are text.
- [scientific] 1.5e-3, 2E10. Overflow is infinite here; `DataConfig.on_nonfinite` says what happens then.
- [signs] a minus (-, −, －) directly in front is a sign at the start of a line, behind a space, an opening bracket,
  an operator, "=", ":" or a CJK character; it is an operator, thus text, behind a numeral, "%" or a closing bracket,
  also with spaces between (48-12, 48 -12), and a hyphen behind a letter or dot (x-5, COVID-19: 5, 19).
  A plus stays text: it changes no value.
- whatever stands around: $12, 50% (50, not 0.5), 48/2, 3*4, 3x4 (x between numerals is a product), 12-5, a range 3-5,
  a ratio 3:5, #5, 3-year, and letters directly behind: 5kg, 10x, 1st, 3D, 1990s. CJK counts as no letter: 价格是99.9元.
- full-width digits and dot as their ASCII forms (１２．５); a full-width comma ends a clause, so it groups nothing.
  Digits of other scripts, superscripts and fractions such as ½ are text.

Text
- [identifiers] a numeral directly behind a letter or "_" (A4, covid19, v1.2.3, x2); letters between digits (3a7f,
  1_000, 2h30m); two dots or more (1.2.3, 192.168.0.1:80); hex (0x1F), UUIDs; phone numbers:
  +1-555-123-4567, 555-123-4567, (555) 123-4567, 010-12345678, 138 1234 5678, 13812345678 (but not the round
  13812345000).
- [leading_zeros] 007, 00.5.
- [dates] 2024-01-31, 2024/1/31, 31/01/2024, 31.01.2024, 01/31/24, also with a time behind; 2024年1月31日, 1月31日;
  times of day 9:30, 12:30:45 (so a ratio such as 7:11 is one too). A month's name makes no date: "Jan 31, 2024"
  has 31 and 2024. Digits in front of "=" are arithmetic: 2000-10-15=1975. With `dates: true` the part 01 still
  falls under leading_zeros.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from cqwen_dist.config import NumberPolicy

DEFAULT_POLICY = NumberPolicy()

# Letters that bind a numeral to a word: Latin, Greek, Cyrillic, their combining marks, full-width Latin.
_L = (
    "A-Za-z_\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u036f\u0370-\u037d\u037f-\u0386\u0388-\u052f"
    "\u1e00-\u1fee\u1ff0-\u1fff\u2126\u212a\u212b\uff21-\uff3a\uff41-\uff5a"
)
_DECIMAL = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_SCIENTIFIC = rf"{_DECIMAL}[eE][+-]?[0-9]+"
_NOT_INSIDE = r"(?<![0-9])(?<![0-9][.,:])"
_NO_SUM = r"(?![0-9])(?!\.[0-9])(?!\s*=)"

_TIME = r"(?:[01]?[0-9]|2[0-4]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]+)?)?(?![0-9])(?!:\.?[0-9])"
_YEAR, _TWO, _ONE = r"[12][0-9]{3}", r"(?:0[1-9]|[12][0-9]|3[01])", r"(?:0?[1-9]|[12][0-9]|3[01])"
_DAY = "|".join(
    (
        rf"{_YEAR}-(?:0[1-9]|1[0-2])-{_TWO}",
        rf"{_YEAR}(?P<ymd>[/.]){_ONE}(?P=ymd){_ONE}",
        rf"{_TWO}-{_TWO}-{_YEAR}",
        rf"{_ONE}(?P<dmy>[/.]){_ONE}(?P=dmy){_YEAR}",
        rf"{_TWO}/{_TWO}/[0-9]{{2}}",
    )
)
_DATES = "|".join(
    (
        rf"{_NOT_INSIDE}(?:{_DAY}){_NO_SUM}(?:[T ]{_TIME}(?:Z|[+-][0-9]{{2}}:?[0-9]{{2}}(?![0-9]))?)?",
        rf"{_NOT_INSIDE}(?:[0-9]{{4}}年)?[0-9]{{1,2}}月[0-9]{{1,2}}[日号]",
        rf"{_NOT_INSIDE}[0-9]{{4}}年[0-9]{{1,2}}月",
        rf"{_NOT_INSIDE}{_TIME}",
    )
)
_PHONES = "|".join(
    (
        r"(?<=\+)(?=(?:[ -]?[0-9]){10})[0-9]{1,3}[ -][0-9]{2,4}"
        r"(?P<gap>[ -])[0-9]{2,4}(?:(?P=gap)[0-9]{2,4}){0,2}(?![0-9])",
        rf"(?<![0-9-])[0-9]{{3}}-[0-9]{{3}}-[0-9]{{4}}{_NO_SUM}",
        rf"(?<=\()[0-9]{{3}}\) ?[0-9]{{3}}-[0-9]{{4}}{_NO_SUM}",
        rf"(?<![0-9-])0[0-9]{{2,3}}-[0-9]{{7,8}}{_NO_SUM}",
        rf"(?<![0-9-])1[3-9][0-9](?P<cn>[ -])[0-9]{{4}}(?P=cn)[0-9]{{4}}{_NO_SUM}",
        rf"(?<![0-9-])1[3-9][0-9]{{9}}(?<!000){_NO_SUM}",
    )
)
# Groups of three behind no-break or thin spaces; behind plain ones where a group begins with 0, as no number does.
_SPACED = (
    r"[1-9][0-9]{0,2}(?:(?:[\u00a0\u2009\u202f][0-9]{3})+{plain})"
    r"(?![0-9])(?!,[0-9])(?!:[0-9])(?:\.[0-9]+(?![0-9]))?(?!\.[0-9])"
)
# A row of such groups behind plain spaces. Whether one of them begins with 0 is asked once a row, not in the pattern,
# which would look through the rest of the row again at each of its numbers.
_ROW = re.compile(r"[0-9]{1,3}(?: [0-9]{3}(?![0-9]))+")
_SEPARATORS = re.compile("[,\u00a0\u2009\u202f ]")
_PRODUCT = r"(?<=[0-9][xX])"
# Letters and digits behind a numeral make it an identifier, save in a product such as 3x4.
_UNGLUED = rf"(?![0-9])(?!(?![xX][0-9])[{_L}]+[0-9])"
_WORD_TAIL = rf"[{_L}0-9]*(?:\.[0-9][{_L}0-9]*)*"
_IDENTIFIERS = "|".join(
    (
        r"0[xX][0-9A-Fa-f]+",
        rf"(?<=[{_L}])(?!{_PRODUCT})[0-9]{_WORD_TAIL}",
        rf"[0-9]*(?:\.[0-9]+){{2,}}(?:[:/]{_DECIMAL})?",
        rf"(?!{_DECIMAL}[xX][0-9]){{not_scientific}}{_DECIMAL}[{_L}]+[0-9]{_WORD_TAIL}",
    )
)
# An identifier that may begin with a letter, looked for beforehand.
_UUID = re.compile(
    rf"(?<![{_L}0-9.+-])[0-9a-fA-F]{{8}}(?:-[0-9a-fA-F]{{4}}){{3}}-[0-9a-fA-F]{{12}}(?![{_L}0-9]|\.[0-9])"
)

# One character to one, so that positions stay: full-width digits, dot, colon and minus, the minus sign.
_TO_ASCII = {0xFF10 + d: 0x30 + d for d in range(10)} | {0xFF0E: 0x2E, 0xFF1A: 0x3A, 0xFF0D: 0x2D, 0x2212: 0x2D}
# The next digit; and where nothing stands around that could make it anything else, its whole number, and group 1: most
# numerals of a text, which this finds several times as fast as the policy's pattern. Without signs, groups, zeros in
# front, dates, identifiers, phone numbers; so it is the same for every policy.
_NEXT = re.compile(
    r"[0-9](?:(?<=[\s$=*+/<(][1-9])[0-9]{0,7}(?:\.[0-9]{1,4})?"
    r"(?=[$%*+=?!;'\"\n<>]|[ .,](?![0-9])|\)(?! ?[0-9])|/(?![0-9]+/)|\Z)()"
    r"|(?<=\s[1-9])[0-9]{0,7}(?= [0-9]{1,2}(?![0-9]))())?",
    re.ASCII,
)
_LETTER = re.compile(rf"[{_L}]")


class NumberSpan(NamedTuple):
    """A number in a text: text[start:end] is its literal, sign included; value is float64 (infinite if too large)."""

    start: int
    end: int
    value: float


@lru_cache(maxsize=64)
def _reader(policy: NumberPolicy, spaced: bool) -> re.Pattern[str]:
    """What may stand at a digit: group `number`, or text to be passed over: date, phone, identifier or zeros.

    spaced: groups behind plain spaces are one number here.
    """
    text = []
    if not policy.dates:
        text.append(f"(?P<date>{_DATES})")
    if not policy.identifiers:
        guard = rf"(?!{_SCIENTIFIC}{_UNGLUED})" if policy.scientific else ""
        identifiers = _IDENTIFIERS.replace("{not_scientific}", guard)
        text += [f"(?P<phone>{_PHONES})", f"(?P<identifier>{identifiers})"]
    if not policy.leading_zeros:
        text.append(r"(?P<zeros>0[0-9]+(?:\.[0-9]+)?)")
    number = _DECIMAL
    if policy.scientific:
        number += rf"(?:[eE][+-]?[0-9]+{r'(?![0-9])' if policy.identifiers else _UNGLUED})?"
    if policy.thousands:
        groups = r"(?<![0-9],)[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])(?!,[0-9])(?:\.[0-9]+(?![0-9]))?(?!\.[0-9])"
        spaces = _SPACED.replace("{plain}", "|(?: [0-9]{3})+" if spaced else "")
        number = f"(?:{groups}|{spaces}){_UNGLUED}|{number}"
    return re.compile("|".join([*text, f"(?P<number>{number})"]))


def find_numbers(text: str, policy: NumberPolicy = DEFAULT_POLICY) -> list[NumberSpan]:
    """The numbers of a text from left to right, as this module's policy says (seed S0 1.1)."""
    return _scan(text, policy, None)


def find_left(text: str, policy: NumberPolicy = DEFAULT_POLICY) -> list[tuple[int, int, str]]:
    """What has digits and stays text: (start, end, why): date (or time), phone, identifier (also UUIDs), zeros."""
    left: list[tuple[int, int, str]] = []
    _scan(text, policy, left)
    return left


def _scan(text: str, policy: NumberPolicy, left: list[tuple[int, int, str]] | None) -> list[NumberSpan]:
    plain = text if text.isascii() else text.translate(_TO_ASCII)
    readers = _reader(policy, False), _reader(policy, True)
    blocked = [] if policy.identifiers else [m.span() for m in _UUID.finditer(plain)][::-1]
    spans: list[NumberSpan] = []
    position = row_end = last_zero = 0
    while (digit := _NEXT.search(plain, position)) is not None:
        start, position = digit.span()
        if digit.lastindex:
            spans.append(NumberSpan(start, position, float(digit[0])))
            continue
        if plain[start - 1 : start] == "." and _opens_decimal(text, plain, start - 1):
            start -= 1
        while blocked and blocked[-1][1] <= start:
            blocked.pop()
        if blocked and blocked[-1][0] <= start:
            position = blocked[-1][1]
            if left is not None:
                left.append((*blocked[-1], "identifier"))
            continue
        if start >= row_end and (row := _ROW.match(plain, start)) is not None:
            row_end, last_zero = row.end(), plain.rfind(" 0", start, row.end())
        match = readers[start < last_zero].match(plain, start)
        assert match is not None, "every digit begins a number or a text"
        position = match.end()
        if match.lastgroup == "number":
            if policy.signs and start and plain[start - 1] == "-" and _is_sign(plain, start - 1):
                start -= 1
            literal = plain[start:position]
            value = float(literal if literal.isdecimal() else _SEPARATORS.sub("", literal))
            if policy.accounting and "," in literal and _in_brackets(plain, start, position):
                start, position, value = start - 1, position + 1, -value
            spans.append(NumberSpan(start, position, value))
        elif left is not None:
            left.append((start, position, str(match.lastgroup)))
        while last_zero < position < row_end - 4 and plain[position] == " ":  # inside a row nothing makes it else
            start, position = position + 1, position + 4
            spans.append(NumberSpan(start, position, float(plain[start:position])))
    return spans


def _in_brackets(plain: str, start: int, end: int) -> bool:
    """Whether brackets stand directly around, and they are no product's or function's."""
    before = plain[start - 2 : start - 1] if start > 1 else ""
    around = start > 0 and plain[start - 1] == "(" and plain[end : end + 1] == ")"
    return around and plain[start] != "-" and not (before.isdecimal() or before in (")", "]") or _LETTER.match(before))


def _opens_decimal(text: str, plain: str, dot: int) -> bool:
    """Whether the dot in front of a digit belongs to it, as in ".5"."""
    before = plain[dot - 1 : dot]
    return text[dot] == "." and not (before == "." or before.isdecimal() or _LETTER.match(before))


def _is_sign(plain: str, minus: int) -> bool:
    """Whether the minus directly in front of a numeral is its sign, neither operator nor hyphen."""
    before = plain[minus - 1 : minus]
    if before == "-":
        return plain[minus - 2 : minus - 1].isdecimal()
    if before == "." or _LETTER.match(before):
        return False
    left = minus
    while left and plain[left - 1] in " \t":
        left -= 1
    left_of = plain[left - 1 : left]
    return not (left_of.isdecimal() or left_of in ("%", "％", ")", "]", "}", "）"))


def _forms(value: float, policy: NumberPolicy) -> list[str]:
    """Ways to write a finite value, the plainest first; all read back as exactly this float64."""
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
        forms.append(f"{whole}e{int(exponent) - places}")  # a row of digits, as a phone number in front may need
    if policy.accounting and policy.thousands and value < 0:  # where a minus would be none
        forms.append(f"({-Decimal(digits.removesuffix('.0')):,f})")
    return forms


def format_value(value: float, policy: NumberPolicy = DEFAULT_POLICY) -> str:
    """The shortest usual spelling that `find_numbers` reads back as this one float64: 48, 0.5, -3, 1e300.

    A value that the policy would not read in plain digits (13812345678 looks like a phone number) gets ".0" or an
    exponent. NaN and the infinities become "nan", "inf" and "-inf", which are no numbers to `find_numbers`.
    """
    if not math.isfinite(value):
        return str(value)
    forms = _forms(value, policy)
    for form in forms:
        if find_numbers(form, policy) == [(0, len(form), value)]:
            return form
    return forms[0]


def _number_behind(
    starts: list[int], pieces: Sequence[str | float], widths: list[int], given_up: set[int]
) -> int | None:
    """The first number behind a text that is read as one: in another form it may leave that a text.

    starts: of all numbers that are read, ascending; widths: of the pieces as they are written.
    """
    end, extra = 0, False
    for i, (piece, width) in enumerate(zip(pieces, widths, strict=True)):
        start, end = end, end + width
        if isinstance(piece, str):
            extra = extra or bisect_left(starts, start) < bisect_left(starts, end)
        elif extra and math.isfinite(piece) and i not in given_up:
            return i
        else:
            extra = False
    return None


def write_numbers(pieces: Sequence[str | float], policy: NumberPolicy = DEFAULT_POLICY) -> str:
    """Texts and numbers joined to one text from which `find_numbers` reads the same numbers at the same places.

    Numbers are written plainly, save where that would be misread: 100 in front of ",456" becomes 100.0, and two
    numbers in a row get a space between. Pieces that no reading gives (text that is itself a numeral, beside a
    number) are written plainly.
    """
    forms = [
        [piece] if isinstance(piece, str) else _forms(piece, policy) if math.isfinite(piece) else [str(piece)]
        for piece in pieces
    ]
    for i in range(1, len(pieces)):
        if not isinstance(pieces[i], str) and not isinstance(pieces[i - 1], str):
            forms[i] = [f" {form}" for form in forms[i]]
    chosen = [0] * len(pieces)
    given_up: set[int] = set()
    read: dict[int, int] = {}  # the form in which a number was read, where the text in front was, too
    while True:
        text = "".join(form[k] for form, k in zip(forms, chosen, strict=True))
        spans = find_numbers(text, policy)
        ends = {span.start: span.end for span in spans}
        position, misread = 0, None
        for i, (piece, form, k) in enumerate(zip(pieces, forms, chosen, strict=True)):
            start, position = position + form[k].startswith(" "), position + len(form[k])
            if (
                not isinstance(piece, str)
                and math.isfinite(piece)
                and i not in given_up
                and ends.get(start) != position
            ):
                misread = i
                break
        if misread is None:
            widths = [len(form[k]) for form, k in zip(forms, chosen, strict=True)]
            starts = [span.start for span in spans if math.isfinite(span.value)]
            misread = _number_behind(starts, pieces, widths, given_up)
            if misread is None:
                return text
            read.setdefault(misread, chosen[misread])
        chosen[misread] += 1
        if chosen[misread] == len(forms[misread]):
            chosen[misread] = read.get(misread, 0)
            given_up.add(misread)
