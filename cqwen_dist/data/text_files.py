"""Records of text files, compressed or not: their lines, JSON and CSV; and writing CSV."""

import codecs
import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from cqwen_dist.config.data import DataConfig, source_files
from cqwen_dist.config.errors import BadLine, Said, UserError
from cqwen_dist.data.cells import Literal
from cqwen_dist.data.records import MAX_TEXT, Row, needed_columns, too_long

_BROKEN_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)


def opened(path: Path) -> Any:
    """The file for reading bytes, unpacked if its name ends in .gz."""
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")


class Lines:
    """Lines of a file, with line numbers.

    Yields a `BadLine` for an overlong line (never held in memory) and at the end of a broken gzip file.
    """

    def __init__(self, file: Any, path: Path, config: DataConfig) -> None:
        self.file, self.path, self.config, self.number = file, path, config, 0

    def __iter__(self) -> Iterator[bytes | BadLine]:
        try:
            while line := self.file.readline(MAX_TEXT + 1):
                self.number += 1
                if (size := len(line)) <= MAX_TEXT or line.endswith(b"\n"):
                    yield line
                    continue
                while line and not line.endswith(b"\n"):
                    line = self.file.readline(MAX_TEXT)
                    size += len(line)
                yield too_long(size)
        except _BROKEN_GZIP as error:
            self.number += 1
            yield no_whole_file(error)

    def begin_with(self, sign: bytes) -> bool:
        """Whether the first non-space byte is `sign`."""
        try:
            return self.file.peek(1024).lstrip(codecs.BOM_UTF8 + b" \t\r\n").startswith(sign)
        except _BROKEN_GZIP:
            return False  # the first read reports the error

    def some(self, size: int) -> bytes:
        """Read `size` bytes, fewer at the end. Raises: BadLine for a broken gzip file."""
        try:
            return self.file.read(size)
        except _BROKEN_GZIP as error:
            raise no_whole_file(error) from None

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"


def no_whole_file(error: Exception) -> BadLine:
    return BadLine("broken gzip", f"no whole file ({error})", "a whole gzip file")


def decoded(line: bytes | BadLine) -> str:
    if isinstance(line, BadLine):
        raise line
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        allowed = f"UTF-8 text, such as iconv -f {'UTF-16' if line[0] >= 0xFE else 'WINDOWS-1252'} -t UTF-8 makes"
        if line.startswith((b"\x1f\x8b", b"BZh", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"PK\x03\x04")):
            allowed = "a file that is not packed, or packed by gzip with a name that ends in .gz"
        raise BadLine("not UTF-8", error.object[error.start : error.end], allowed) from None
    if "\0" in text:
        raise BadLine("not UTF-8", Said("zero bytes"), "UTF-8 text, such as iconv -f UTF-16LE -t UTF-8 makes")
    return text


# ----------------------------------------------------------------------------------------------------------------- JSON

# NaN, as Python and R write it, is an empty cell; Infinity is no text, which matters only if a template names it.
_JSON = json.JSONDecoder(parse_int=Literal, parse_float=Literal, parse_constant=float)


def json_record(text: str) -> Mapping[str, Any]:
    """The object of a line. Raises `BadLine`."""
    try:
        record = _JSON.decode(text)
    except (ValueError, RecursionError) as error:
        allowed = f"one JSON object a line; a list in a .json, text in a .txt ({error})"
        raise BadLine("broken JSON", text.strip()[:60], allowed) from None
    if not isinstance(record, dict):
        raise BadLine("no JSON object", text.strip()[:60], 'one JSON object a line, such as {"text": "..."}')
    return record


def whole(lines: Lines) -> dict[str, Any] | None:
    """The one object of a .json file; None if the file has an object per line, like JSONL."""
    try:
        record = _JSON.decode(lines.some(MAX_TEXT).decode("utf-8-sig").strip())
    except (ValueError, RecursionError, BadLine):
        record = None
    lines.file.seek(0)
    return record if isinstance(record, dict) else None


def no_records(record: Mapping[str, Any]) -> BadLine | None:
    """Why an object is no record but a whole table in one; None if it may be a record."""

    def is_row(value: object) -> bool:  # an object, and no message of a chat
        return isinstance(value, dict) and "role" not in value and "from" not in value

    for name, value in record.items():
        if isinstance(value, list) and len(value) > 1 and all(map(is_row, value)):
            found = Said(f"one object with the records under the key {name}")
            return BadLine("no list of records", found, "the list by itself: [{...}, {...}], or one object a line")
    values = [value for value in record.values() if isinstance(value, (list, dict)) and len(value) > 1]
    sizes = {tuple(value) if isinstance(value, dict) else len(value) for value in values}
    if len(values) < 2 or len(values) < len(record) or len(sizes) > 1:
        return None
    how = "a list" if isinstance(values[0], list) else "an object of rows"
    found = Said(f"one object with {how} for each column{', as pandas writes it' * (how != 'a list')}")
    return BadLine("no list of records", found, "a list of records: df.to_json(FILE, orient='records')")


_BEFORE_RECORD = re.compile(r"\s*([\[,])\s*")
_END_OF_ARRAY = re.compile(r"\s*(\[\s*)?\]\s*")


def of_array(lines: Lines) -> Iterator[Row]:
    """Yield the records of a JSON array.

    Raises: UserError for broken JSON, because no later record can be found.
    """

    def refusal(kind: str, found: object, allowed: str, newlines: int) -> UserError:
        return UserError(kind, found, allowed, f"{lines.path}:{1 + newlines}")

    try:
        text = lines.some(-1).decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        newlines = wrong.object.count(b"\n", 0, wrong.start)
        raise refusal("not UTF-8", wrong.object[wrong.start : wrong.end], "UTF-8 text", newlines) from None
    except BadLine as bad:
        raise refusal(bad.kind, bad.found, bad.allowed, 0) from None
    at = newlines = 0
    while not _END_OF_ARRAY.fullmatch(text, at):
        sign = _BEFORE_RECORD.match(text, at)
        try:
            if sign is None or (sign[1] == "[") != (at == 0):
                raise json.JSONDecodeError("no list of records", text, at)
            record, end = _JSON.raw_decode(text, sign.end())
        except (ValueError, RecursionError) as error:
            newlines += text.count("\n", at, getattr(error, "pos", at))
            allowed = f"a list of records ({getattr(error, 'msg', error)})"
            raise refusal("broken JSON", text[at : at + 60], allowed, newlines) from None
        newlines += text.count("\n", at, sign.end())
        what = record if isinstance(record, dict) else BadLine("no JSON object", record, "a list of JSON objects")
        yield f"{lines.path}:{1 + newlines}", what
        newlines += text.count("\n", sign.end(), end)
        at = end


# ------------------------------------------------------------------------------------------------------------------ CSV

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
        with opened(path) as file:
            return _header(map(decoded, Lines(file, path, DataConfig(train=source))), name.endswith(".tsv"))[1]
    except (OSError, UserError, BadLine):
        return ","


def write_table(rows: Iterable[Mapping[str, Any]], out: TextIO) -> int:
    """Write CSV row by row, with the first row's names as header; returns the number of rows, without any nothing is
    written.

    No name in the header can look like a second delimiter; None becomes an empty cell.
    """
    rest = iter(rows)
    if (first := next(rest, None)) is None:
        return 0
    columns = list(first)
    lines, odd = _Lines(out), {*_DELIMITERS[1:]} & {*"".join(columns)}
    csv.writer(lines, lineterminator="\r\n", quoting=csv.QUOTE_ALL if odd else csv.QUOTE_MINIMAL).writerow(columns)
    writer, count = csv.DictWriter(lines, columns, lineterminator="\r\n"), 0
    for count, row in enumerate(chain([first], rest), 1):  # noqa: B007
        writer.writerow(row)
    return count


class _Lines:
    """Writes \\n line ends. `csv` gets \\r\\n, because it quotes the characters of its line end: lone \\r, too."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def write(self, line: str) -> int:
        return self.out.write(line[:-2] + "\n")
