"""CSV: delimiter, empty cells, and writing."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

# Missing values as written by pandas, R, spreadsheets and databases; also Excel's errors
MISSING = frozenset({"", "NaN", "nan", "NA", "N/A", "n/a", "#N/A", "<NA>", "None", "NULL", "null", "NaT"}) | frozenset(
    {"#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!", "#NULL!", "#CALC!", "#SPILL!"}
)
_DELIMITERS = ",;\t|"
_QUOTED = re.compile(r'"[^"]*("|$)')
_SAYS = re.compile(r"\ufeff?\"?sep=(.)\"?\s*", re.IGNORECASE)  # Excel's first line, which names the separator


def delimiter_of(header: str) -> str:
    """Most frequent of comma, semicolon, tab and bar outside quotes; comma if there is none."""
    return max(_DELIMITERS, key=_QUOTED.sub("", header).count)


def said_delimiter(line: str) -> str | None:
    """The separator of a line such as sep=; before the header; None for any other line."""
    found = _SAYS.fullmatch(line)
    return found[1] if found is not None else None


def write_rows(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], out: TextIO) -> int:
    """Write CSV with a header; returns the number of rows.

    No name in it can look like a second delimiter; None becomes an empty cell.
    """
    lines, odd = _Lines(out), {*_DELIMITERS[1:]} & {*"".join(columns)}
    csv.writer(lines, lineterminator="\r\n", quoting=csv.QUOTE_ALL if odd else csv.QUOTE_MINIMAL).writerow(columns)
    writer, count = csv.DictWriter(lines, columns, lineterminator="\r\n"), 0
    for count, row in enumerate(rows, 1):  # noqa: B007
        writer.writerow(row)
    return count


class _Lines:
    """Writes \\n line ends. `csv` gets \\r\\n, because it quotes the characters of its line end: lone \\r, too."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def write(self, line: str) -> int:
        return self.out.write(line[:-2] + "\n")
