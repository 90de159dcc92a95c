"""Records of CSV files."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from cqwen_dist.config.data import DataConfig, source_files
from cqwen_dist.config.errors import BadLine, UserError
from cqwen_dist.data.delimited import delimiter_of, said_delimiter
from cqwen_dist.data.lines import Lines, decoded
from cqwen_dist.data.records import MAX_TEXT, Row, needed_columns


def of_csv(lines: Lines, tabs: bool) -> Iterator[Row]:
    csv.field_size_limit(MAX_TEXT)
    texts = map(decoded, lines)
    try:
        header, delimiter = _header(texts, tabs)
    except BadLine as bad:
        yield lines.where, bad
        return
    reader = csv.reader(chain([header], texts), delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    needed: list[str] = []
    while True:
        try:
            row = next(reader)
            if not row:
                continue
            if columns is None:
                columns = [name.strip() for name in row]  # one without a name, such as pandas' index, is skipped
                needed = needed_columns(lines.config, columns, lines.where)
                continue
            if len(row) != len(columns):
                raise BadLine("wrong number of cells", len(row), f"{len(columns)}, as the first row has")
            cells = dict(zip(columns, row, strict=True))
            yield lines.where, {name: cells[name] if name in needed else None for name in cells}
        except StopIteration:
            return
        except csv.Error as error:
            yield lines.where, BadLine("broken CSV", f"no row ({error})", "quotes that end, \\n after a line, no NUL")
        except BadLine as bad:
            yield lines.where, bad
            if not needed:  # a bad header makes every row unusable
                return


def _header(texts: Iterator[str], tabs: bool) -> tuple[str, str]:
    """The line that names the columns, and the separator of cells."""
    header = next((text for text in texts if text.strip()), "")
    said = said_delimiter(header)
    if said is not None:
        header = next((text for text in texts if text.strip()), "")
    return header, said or ("\t" if tabs else delimiter_of(header))


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
