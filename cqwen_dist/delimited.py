"""CSV: the delimiter, numbers with a decimal comma, and how an empty cell is written."""

from __future__ import annotations

import re

# As pandas, R, spreadsheets and databases write it
MISSING = frozenset({"", "NaN", "nan", "NA", "N/A", "n/a", "#N/A", "<NA>", "None", "NULL", "null"})
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


def read_cells(cells: dict[str, str], delimiter: str, decimal_comma: bool) -> tuple[dict[str, str], str | None]:
    """A row's cells by column, and the first column that needs decimal_comma; None: no column does.

    decimal_comma: numbers such as 1.234,5 become 1234.5. Without it, cells between semicolons are searched for them.
    """
    if decimal_comma:
        return {name: _with_point(cell) for name, cell in cells.items()}, None
    return cells, next((name for name, cell in cells.items() if delimiter == ";" and has_decimal_comma(cell)), None)


def _with_point(cell: str) -> str:
    if has_decimal_comma(cell) or _THOUSANDS_POINTS.fullmatch(cell.strip()):
        return cell.replace(".", "").replace(",", ".")
    return cell
