"""CSV files: their records, and writing."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from cqwen_dist.config.data import DataConfig, source_files
from cqwen_dist.config.errors import BadLine, UserError
from cqwen_dist.data.lines import Lines, decoded
from cqwen_dist.data.records import MAX_TEXT, Row, needed_columns

_DELIMITERS = ",;\t|"
_QUOTED = re.compile(r'"[^"]*("|$)')
_SAYS = re.compile(r"\ufeff?\"?sep=(.)\"?\s*", re.IGNORECASE)  # Excel's first line, which names the separator


def of_csv(lines: Lines, tabs: bool) -> Iterator[Row]:
    csv.field_size_limit(MAX_TEXT)
    texts = map(decoded, lines)
    columns: list[str] = []
    try:
        header, delimiter = _header(texts, tabs)
        reader = csv.reader(chain([header], texts), delimiter=delimiter, strict=True)
        columns = [name.strip() for name in next(reader)]  # one without a name, such as pandas' index, is skipped
        needed = needed_columns(lines.config, columns, lines.where) if columns else []
    except (csv.Error, BadLine) as error:  # a bad header makes every row unusable
        yield lines.where, _bad(error)
        return
    while True:
        try:
            row = next(reader, None)
            if row is None:
                return
            if row and len(row) != len(columns):
                raise BadLine("wrong number of cells", len(row), f"{len(columns)}, as the first row has")
        except (csv.Error, BadLine) as error:
            yield lines.where, _bad(error)
        else:
            if row:
                cells = zip(columns, row, strict=True)
                yield lines.where, {name: cell if name in needed else None for name, cell in cells}


def _bad(error: csv.Error | BadLine) -> BadLine:
    if isinstance(error, BadLine):
        return error
    return BadLine("broken CSV", f"no row ({error})", "quotes that end, \\n after a line, no NUL")


def _header(texts: Iterator[str], tabs: bool) -> tuple[str, str]:
    """The line that names the columns, and the separator of cells: else the sign that it has most often."""
    filled = (text for text in texts if text.strip())
    header = next(filled, "")
    if said := _SAYS.fullmatch(header):
        return next(filled, ""), said[1]
    return header, "\t" if tabs else max(_DELIMITERS, key=_QUOTED.sub("", header).count)


def delimiter_in(source: str) -> str:
    """The separator in a source's first CSV file; "," if it has none or none can be read."""
    try:
        path = Path(source_files(source, "")[0]).expanduser()
        name = path.name.lower().removesuffix(".gz")
        if not name.endswith((".csv", ".tsv")):
            return ","
        with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb") as file:
            return _header(map(decoded, Lines(file, path, DataConfig(train=source))), name.endswith(".tsv"))[1]
    except (OSError, UserError, BadLine):
        return ","


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
