"""CSV: delimiter, decimal commas, empty cells, and writing."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

# Missing values as written by pandas, R, spreadsheets and databases
MISSING = frozenset({"", "NaN", "nan", "NA", "N/A", "n/a", "#N/A", "<NA>", "None", "NULL", "null"})
_DELIMITERS = ",;\t|"
_QUOTED = re.compile(r'"[^"]*("|$)')
_DECIMAL_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+([eE][+-]?\d+)?")
_THOUSANDS_POINTS = re.compile(r"[+-]?\d{1,3}(\.\d{3})+")


def delimiter_of(header: str) -> str:
    """Most frequent of comma, semicolon, tab and bar outside quotes; comma if there is none."""
    bare = _QUOTED.sub("", header)
    return max(_DELIMITERS, key=bare.count)


def has_decimal_comma(cell: str) -> bool:
    """Whether a cell is a number such as 3,5 or 1.234,5."""
    return _DECIMAL_COMMA.fullmatch(cell.strip()) is not None


def read_cells(cells: dict[str, str], delimiter: str, decimal_comma: bool) -> tuple[dict[str, str], str | None]:
    """A row's cells by column, and the first column that needs decimal_comma (or None).

    decimal_comma: convert numbers such as 1.234,5 to 1234.5. Without it, cells separated by semicolons are checked for
    such numbers.
    """
    if decimal_comma:
        return {name: _with_point(cell) for name, cell in cells.items()}, None
    return cells, next((name for name, cell in cells.items() if delimiter == ";" and has_decimal_comma(cell)), None)


def _with_point(cell: str) -> str:
    if has_decimal_comma(cell) or _THOUSANDS_POINTS.fullmatch(cell.strip()):
        return cell.replace(".", "").replace(",", ".")
    return cell


def write_rows(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], out: TextIO) -> None:
    """Write CSV with a header. No name in it can look like a second delimiter; None becomes an empty cell."""
    lines, odd = _Lines(out), {*_DELIMITERS[1:]} & {*"".join(columns)}
    csv.writer(lines, lineterminator="\r\n", quoting=csv.QUOTE_ALL if odd else csv.QUOTE_MINIMAL).writerow(columns)
    csv.DictWriter(lines, columns, lineterminator="\r\n").writerows(rows)


class _Lines:
    """Writes \\n line ends. `csv` gets \\r\\n, because it quotes the characters of its line end: lone \\r, too."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def write(self, line: str) -> int:
        return self.out.write(line[:-2] + "\n")
