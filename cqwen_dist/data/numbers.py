"""Finds numerals in text, and their values (`data.write_numbers` writes them back).

The seeds ask for "detect, replace by <NUM>, keep the value" (seed S0 1.1) and leave the details open. docs/numbers.md
defines the policy by examples, each of which a test reads; `NumberPolicy` switches parts of it. Three rules are not
on that page:

- "(1,234)" is no -1234 after a letter, a digit or a closing bracket, nor directly before a numeral.
- A full-width comma ends a clause, so it does not group digits.
- A numeral that float64 does not hold has the value infinity here; it stays text.
"""

import math
import re
from functools import lru_cache
from typing import NamedTuple

from cqwen_dist.config.data import NumberPolicy

DEFAULT_POLICY = NumberPolicy()

# Letters that join a numeral to a word: Latin, Greek, Cyrillic, their combining marks, full-width Latin.
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
        r"(?P<gap>[ -])(?:[0-9]{2,4}(?:(?P=gap)[0-9]{2,4}){0,2}|[0-9]{5,8})(?![0-9])",
        rf"(?<=\+)(?<![0-9)]\+)[1-9][0-9]{{9,14}}(?![0-9{_L}]){_NO_SUM}",
        rf"(?<![0-9-])[0-9]{{3}}-[0-9]{{3}}-[0-9]{{4}}{_NO_SUM}",
        rf"(?<=\()[0-9]{{3}}\) ?[0-9]{{3}}-[0-9]{{4}}{_NO_SUM}",
        rf"(?<![0-9-])0[0-9]{{2,3}}-[0-9]{{7,8}}{_NO_SUM}",
        rf"(?<![0-9-])1[3-9][0-9](?P<cn>[ -])[0-9]{{4}}(?P=cn)[0-9]{{4}}{_NO_SUM}",
        rf"(?<![0-9-])1[3-9][0-9]{{9}}(?<!000){_NO_SUM}",
    )
)
# Groups of three digits after no-break or thin spaces. After plain spaces only in a row that has a group with a leading
# 0: such a group is no separate number, so the spaces must be separators.
_SPACED = (
    r"[1-9][0-9]{0,2}(?:(?:[\u00a0\u2009\u202f][0-9]{3})+{plain})"
    r"(?![0-9])(?!,[0-9])(?!:[0-9])(?:\.[0-9]+(?![0-9]))?(?!\.[0-9])"
)
# A row of such groups with plain spaces. Code checks once per row for a group with a leading 0: a lookahead in the
# pattern would scan the row again at each number, in quadratic time.
_ROW = re.compile(r"[0-9]{1,3}(?: [0-9]{3}(?![0-9]))+")
_SEPARATORS = re.compile("[,\u00a0\u2009\u202f ]")
_PRODUCT = r"(?<=[0-9][xX])"
_CURRENCIES = "AUD|CAD|CHF|CNY|EUR|GBP|HKD|INR|JPY|KRW|RMB|SGD|TWD|USD"  # lengths are equal, as a lookbehind wants it
_PRICE = rf"(?<=(?<![{_L}0-9])(?:{_CURRENCIES}))"
# Letters and digits after a numeral make it an identifier, except in a product such as 3x4.
_UNGLUED = rf"(?![0-9])(?!(?![xX][0-9])[{_L}]+[0-9])"
_NO_HYPHEN = r"(?<![0-9])(?<![0-9]-)"
_WORD_TAIL = rf"[{_L}0-9]*(?:\.[0-9][{_L}0-9]*)*"
_IDENTIFIERS = "|".join(
    (
        r"0[xX][0-9A-Fa-f]+",
        # ISBNs
        rf"{_NO_HYPHEN}(?=(?:[0-9]-?){{13}}(?![0-9-]))97[89](?:-[0-9]{{1,7}}){{3}}-[0-9]{_NO_SUM}",
        rf"{_NO_HYPHEN}(?=(?:[0-9]-?){{9}}[0-9X](?![0-9{_L}-]))[0-9]{{1,5}}(?:-[0-9]{{1,7}}){{2}}-[0-9X]{_NO_SUM}",
        rf"(?<=[{_L}])(?!{_PRODUCT}|{_PRICE})[0-9]{_WORD_TAIL}",
        rf"[0-9]*(?:\.[0-9]+){{2,}}(?:[:/]{_DECIMAL})?",
        rf"(?!{_DECIMAL}[xX][0-9]){{not_scientific}}{_DECIMAL}[{_L}]+[0-9]{_WORD_TAIL}",
    )
)
# UUIDs may start with a letter, but scanning stops only at digits. So they are found first.
_UUID = re.compile(
    rf"(?<![{_L}0-9.+-])[0-9a-fA-F]{{8}}(?:-[0-9a-fA-F]{{4}}){{3}}-[0-9a-fA-F]{{12}}(?![{_L}0-9]|\.[0-9])"
)

# Full-width digits, dot, colon and minus, and the minus sign. Each maps to one character, so positions stay valid.
_TO_ASCII = {0xFF10 + d: 0x30 + d for d in range(10)} | {0xFF0E: 0x2E, 0xFF1A: 0x3A, 0xFF0D: 0x2D, 0x2212: 0x2D}
# Fast path: matches the next digit. If nothing around it can change its meaning, it matches the whole number and sets
# a group. Most numerals qualify: no sign, digit group, leading zero, date, identifier or phone number. Every policy
# reads them the same way, and this is several times faster than the policy's pattern.
_NEXT = re.compile(
    r"[0-9](?:(?<=[\s$=*+/<(][1-9])[0-9]{0,7}(?:\.[0-9]{1,4})?"
    r"(?=[$%*+=?!;'\"\n<>]|[ .,](?![0-9])|\)(?! ?[0-9])|/(?![0-9]+/)|\Z)()"
    r"|(?<=\s[1-9])[0-9]{0,7}(?= [0-9]{1,2}(?![0-9]))())?",
    re.ASCII,
)
_LETTER = re.compile(rf"[{_L}]")
_EQUALS = re.compile(r"\s*=")
_LONGEST = 16  # digits of a whole number; longer ones are identifiers
_NUMERALS = "0123456789零一二三四五六七八九十百千万亿两"  # before a unit


class NumberSpan(NamedTuple):
    """A number in a text: text[start:end] is the literal with its sign; value is float64 (infinite if it does not hold
    the numeral)."""

    start: int
    end: int
    value: float


@lru_cache(maxsize=64)
def _reader(policy: NumberPolicy, spaced: bool) -> re.Pattern[str]:
    """Pattern to match at a digit. Group `number`, or a group to skip: date, phone, identifier or zeros.

    spaced: plain spaces separate thousands here.
    """
    text = []
    # Order matters: the first alternative that matches wins, so everything that stays text precedes the number.
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
    """Numbers in a text, left to right, by this module's policy (seed S0 1.1)."""
    return _Scan(text, policy).run().spans


class _Scan:
    """One pass over a text: collects numbers, and numerals that stay text."""

    def __init__(self, text: str, policy: NumberPolicy) -> None:
        self.text, self.policy = text, policy
        self.plain = text if text.isascii() else text.translate(_TO_ASCII)
        self.spans: list[NumberSpan] = []
        # Numerals that stay text: start, end, reason: date (or time), phone, identifier (also UUIDs), zeros
        self.left: list[tuple[int, int, str]] = []
        self._uuids = [] if policy.identifiers else [m.span() for m in _UUID.finditer(self.plain)][::-1]  # for pop()
        self._reader, self._row_reader = _reader(policy, False), _reader(policy, True)
        self._row_end = self._last_zero = 0  # latest row of groups: its end, and its last group with a leading 0

    def run(self) -> "_Scan":
        """Scan to the end of the text."""
        plain, search, found = self.plain, _NEXT.search, self.spans.append
        position = 0
        while (digit := search(plain, position)) is not None:
            start, position = digit.span()
            if digit.lastindex:  # the fast path matched a complete number
                found(NumberSpan(start, position, float(digit[0])))
            else:
                position = self._read(start)
        return self

    def _read(self, start: int) -> int:
        """Read a number or skip text at a digit, by the policy's pattern; returns its end."""
        plain = self.plain
        # The scan stops at digits, so look back for the dot of a numeral such as .5.
        before = plain[start - 2 : start - 1] if start > 1 else ""
        in_word = before == "." or before.isdecimal() or _LETTER.match(before)
        if self.text[start - 1 : start] == "." and not in_word:
            start -= 1
        if self._uuids and (end := self._uuid_end(start)):
            return end
        if start >= self._row_end and (row := _ROW.match(plain, start)) is not None:
            self._row_end, self._last_zero = row.end(), plain.rfind(" 0", start, row.end())
        # Up to the row's last group with a leading 0, plain spaces separate thousands.
        match = (self._row_reader if start < self._last_zero else self._reader).match(plain, start)
        assert match is not None, "every digit begins a number or a text"
        end = match.end()
        if match.lastgroup == "number":
            end = self._number(start, end)
        else:
            self.left.append((start, end, str(match.lastgroup)))
        while self._last_zero < end < self._row_end - 4 and plain[end] == " ":  # these groups are separate numbers
            self.spans.append(NumberSpan(end + 1, end + 4, float(plain[end + 1 : end + 4])))
            end += 4
        return end

    def _uuid_end(self, start: int) -> int:
        """End of the UUID that covers a position; 0 if none does."""
        while self._uuids and self._uuids[-1][1] <= start:
            self._uuids.pop()
        if not self._uuids or self._uuids[-1][0] > start:
            return 0
        self.left.append((*self._uuids[-1], "identifier"))
        return self._uuids[-1][1]

    def _number(self, start: int, end: int) -> int:
        """Append a number with its sign or brackets; returns its end."""
        plain, policy = self.plain, self.policy
        if policy.signs and start and plain[start - 1] == "-" and _is_sign(plain, start - 1, end):
            start -= 1
        literal = plain[start:end]
        bare = literal if literal.isdecimal() else _SEPARATORS.sub("", literal)
        value = float(bare)
        if math.isfinite(value) and not is_held(bare):
            value = math.inf
        if policy.accounting and "," in literal and _in_brackets(plain, start, end):
            start, end, value = start - 1, end + 1, -value
        self.spans.append(NumberSpan(start, end, value))
        return end


def is_held(numeral: str) -> bool:
    """Whether float64 holds a numeral; a whole one in all digits, of which it has at most `_LONGEST`."""
    digits = numeral.removeprefix("-")
    if not digits.isdecimal():
        return math.isfinite(float(numeral))
    return len(digits) <= _LONGEST and int(digits) == float(digits)


def _in_brackets(plain: str, start: int, end: int) -> bool:
    """Whether brackets enclose the numeral, do not belong to a product or function, and no numeral follows directly."""
    if plain[end + 1 : end + 3].lstrip(".")[:1].isdecimal():
        return False
    before = plain[start - 2 : start - 1] if start > 1 else ""
    around = start > 0 and plain[start - 1] == "(" and plain[end : end + 1] == ")"
    return around and plain[start] != "-" and not (before.isdecimal() or before in (")", "]") or _LETTER.match(before))


def _is_sign(plain: str, minus: int, end: int) -> bool:
    """Whether the minus before a numeral that ends at `end` is a sign, not an operator, hyphen or dash."""
    before = plain[minus - 1 : minus]
    if before == "-":
        return plain[minus - 2 : minus - 1].isdecimal() and _EQUALS.match(plain, end) is not None
    if before == "." or _LETTER.match(before):
        return False
    for size in (1, 2):  # of a unit: 23日-26日, 3公里-5公里
        unit = plain[max(0, minus - size) : minus]
        numeral = plain[minus - size - 1 : minus - size] if minus > size else ""
        if numeral and numeral in _NUMERALS and unit == plain[end : end + size] and (unit.isalpha() or unit == "°"):
            return False
    left = minus
    while left and plain[left - 1] in " \t":
        left -= 1
    left_of = plain[left - 1 : left]
    return not (left_of.isdecimal() or left_of in ("%", "％", ")", "]", "}", "）"))
