"""CSV as it is met: which sign stands between cells, and numbers with a decimal comma."""

from __future__ import annotations

import re

_DELIMITERS = ",;\t|"
_QUOTED = re.compile(r'"[^"]*("|$)')
_DECIMAL_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+([eE][+-]?\d+)?")
_THOUSANDS_POINTS = re.compile(r"[+-]?\d{1,3}(\.\d{3})+")


def delimiter_of(header: str) -> str:
    """The most frequent of comma, semicolon, tab and bar outside quotes; a comma where there is none."""
    bare = _QUOTED.sub("", header)
    return max(_DELIMITERS, key=bare.count)


def has_decimal_comma(cell: str) -> bool:
    """Whether a cell is a number such as 3,5 or 1.234,5."""
    return _DECIMAL_COMMA.fullmatch(cell.strip()) is not None


def with_decimal_point(cell: str) -> str:
    """A number with a decimal comma, or with points between thousands, as 1234.5; any other cell as it is."""
    if has_decimal_comma(cell) or _THOUSANDS_POINTS.fullmatch(cell.strip()):
        return cell.replace(".", "").replace(",", ".")
    return cell
