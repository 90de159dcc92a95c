"""Files split into record blocks, so that multiple processes can read one file.

The splitting process does little: it splits JSON lines and text at line ends and takes Parquet's record batches. The
process that gets a block parses it. Formats that must be parsed to be split are read here, row by row, and become row
blocks: CSV (quoted cells may contain line ends), JSON arrays, paragraphs and `datasets`.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from cqwen_dist.config.data import DataConfig, source_files
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.data.cells import BadLine, Literal
from cqwen_dist.data.records import MAX_TEXT, Block, Row, Text, needed_columns, too_long
from cqwen_dist.data.tables import of_datasets, of_parquet
from cqwen_dist.delimited import delimiter_of, read_cells
from cqwen_dist.wings import from_wing

BLOCK = 1 << 20  # approximate bytes per block
_ROWS = 1000  # maximum table rows per block
_SHEETS = (".xlsx", ".xlsm", ".xls", ".ods", ".numbers")
_BUNDLED = {"diabetes": ("train", "test"), "diabetes/train": ("train",), "diabetes/test": ("test",)}
_BROKEN_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)
# Line -> record, None for an empty line. Raises `BadLine`.
ParsedLine = Callable[[bytes], "Mapping[str, Any] | None"]


def blocks(source: str, config: DataConfig, key: str) -> Iterator[Block]:
    """Yield a source's blocks in order. Raises: UserError for a missing or unreadable source."""
    for one in source_files(source, key):
        path = Path(one).expanduser()
        try:
            if one.startswith("bundled:"):
                yield _bundled(one, key)
            elif path.is_file() and not one.startswith("hf:"):
                yield from _of_file(path, config, key)
            else:
                yield from _of_rows(of_datasets(one, config, key))
        except OSError as error:
            raise UserError(key, one, f"a readable file ({error.strerror or error})") from None


def _bundled(source: str, key: str) -> Block:
    name = source.removeprefix("bundled:")
    if name not in _BUNDLED:
        raise UserError(key, source, " or ".join(f"bundled:{known}" for known in _BUNDLED))
    texts_of = from_wing("bundled:diabetes")
    texts = enumerate(chain.from_iterable(map(texts_of, _BUNDLED[name])), 1)
    return partial(list, [(f"{source}:{number}", Text(text, f"{source}:{number}")) for number, text in texts])


def _of_file(path: Path, config: DataConfig, key: str) -> Iterator[Block]:
    name = path.name.lower()
    ending = Path(name.removesuffix(".gz")).suffix
    if ending in _SHEETS:
        raise UserError(key, str(path), "text, JSONL, CSV or Parquet: save the sheet as a .csv in UTF-8")
    if ending == ".parquet":
        yield from of_parquet(path, config, _ROWS, BLOCK)
        return
    with gzip.open(path, "rb") if name.endswith(".gz") else path.open("rb") as file:
        lines = _Lines(file, path, config)
        if ending in (".csv", ".tsv"):
            yield from _of_rows(_of_csv(lines, ending == ".tsv"))
        elif ending == ".json" and lines.begin_with(b"["):
            yield from _of_rows(_of_array(lines))
        elif ending != ".txt":
            yield from _of_lines(lines, _json_line)
        elif config.sample_by == "line":
            yield from _of_lines(lines, partial(_text_line, config.text_field))
        else:
            yield from _of_rows(_of_text(lines, config))


def _of_rows(rows: Iterator[Row]) -> Iterator[Block]:
    held: list[Row] = []
    size = 0
    for row in rows:
        try:
            size += _size(row[1])
        except RecursionError:
            row = row[0], BadLine("broken JSON", Said("values nested too deep"), "a few levels")
        held.append(row)
        if len(held) == _ROWS or size >= BLOCK:
            yield partial(list, held)
            held, size = [], 0
    if held:
        yield partial(list, held)


def _size(value: object) -> int:
    """Number of characters (or numbers) in a record."""
    if isinstance(value, (Mapping, list, tuple)):
        return sum(map(_size, value.values() if isinstance(value, Mapping) else value))
    return len(value) if isinstance(value, str) else 1


# ----------------------------------------------------------------------------------------------------------- lines


class _Lines:
    """Lines of a file, with line numbers.

    Yields a `BadLine` for an overlong line (never held in memory) and at the end of a broken gzip file.
    """

    def __init__(self, file: io.BufferedReader | gzip.GzipFile, path: Path, config: DataConfig) -> None:
        self.file, self.path, self.config, self.number = file, path, config, 0

    def __iter__(self) -> Iterator[bytes | BadLine]:
        try:
            while line := self.file.readline(MAX_TEXT + 1):
                self.number += 1
                size = len(line)
                if size <= MAX_TEXT or line.endswith(b"\n"):
                    yield line
                    continue
                while line and not line.endswith(b"\n"):
                    line = self.file.readline(MAX_TEXT)
                    size += len(line)
                yield too_long(size)
        except _BROKEN_GZIP as error:
            self.number += 1
            yield _no_whole_file(error)

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
            raise _no_whole_file(error) from None

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"


def _no_whole_file(error: Exception) -> BadLine:
    return BadLine("broken gzip", f"no whole file ({error})", "a whole gzip file")


def _of_lines(lines: _Lines, parsed: ParsedLine) -> Iterator[Block]:
    """Yield blocks of complete lines."""
    held: list[bytes] = []
    size = 0
    for line in chain(lines, [None]):  # None marks the end
        if isinstance(line, bytes):
            held.append(line)
            size += len(line)
        # A bad line ends the current block too, so records and errors keep the file's order.
        if held and (size >= BLOCK or not isinstance(line, bytes)):
            first = lines.number - isinstance(line, BadLine) - len(held) + 1
            yield partial(_line_rows, parsed, str(lines.path), first, b"".join(held))
            held, size = [], 0
        if isinstance(line, BadLine):
            yield partial(list, [(lines.where, line)])


def _line_rows(parsed: ParsedLine, name: str, first: int, data: bytes) -> Iterator[Row]:
    """Parse lines to records. first: line number of the first line."""
    for number, line in enumerate(io.BytesIO(data), first):
        record: Mapping[str, Any] | BadLine | None
        try:
            record = parsed(line)
        except BadLine as bad:
            record = bad
        if record is not None:
            yield f"{name}:{number}", record


def _json_line(line: bytes) -> Mapping[str, Any] | None:
    if not line.strip(b"\xef\xbb\xbf \t\r\n"):
        return None
    text = _decoded(line)
    try:
        record = _JSON.decode(text)
    except (ValueError, RecursionError) as error:
        raise BadLine("broken JSON", text.strip()[:60], f"one JSON object a line ({error})") from None
    if not isinstance(record, dict):
        raise BadLine("no JSON object", text.strip()[:60], 'one JSON object a line, such as {"text": "..."}')
    return record


def _text_line(field: str, line: bytes) -> Mapping[str, Any] | None:
    text = _decoded(line)
    return {field: text.strip("\r\n")} if text.strip() else None


def _decoded(line: bytes | BadLine) -> str:
    if isinstance(line, BadLine):
        raise line
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadLine("not UTF-8", error.object[error.start : error.end], "UTF-8 text") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


_JSON = json.JSONDecoder(parse_int=Literal, parse_float=Literal, parse_constant=_no_constant)


def _of_text(lines: _Lines, config: DataConfig) -> Iterator[Row]:
    """Yield paragraphs, or the file as one text."""
    held: list[str] = []
    size, began = 0, 1
    for line in chain(lines, [None]):  # None marks the end
        done = line is None
        try:
            text = "" if line is None else _decoded(line)
            size += len(text)
            if size > MAX_TEXT:
                held, size = [], 0
                raise too_long(MAX_TEXT)
        except BadLine as bad:
            yield lines.where, bad
            continue
        if not held:
            began = lines.number
        if text.strip() or (held and config.sample_by == "document" and not done):
            held.append(text)
        ends = done or (config.sample_by == "paragraph" and not text.strip())
        if ends and held:
            yield f"{lines.path}:{began}", {config.text_field: "".join(held).strip("\r\n")}
        if ends:
            held, size = [], 0


_BEFORE_RECORD = re.compile(r"\s*([\[,])\s*")
_END_OF_ARRAY = re.compile(r"\s*(\[\s*)?\]\s*")
_CHUNK = 1 << 16


def _of_array(lines: _Lines) -> Iterator[Row]:
    """Yield the records of a JSON array, with one record in memory at a time.

    Raises: UserError for broken JSON, because no later record can be found.
    """
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    text, at, number, done, first = "", 0, 1, False, True

    def refusal(kind: str, found: object, allowed: str, end: int) -> UserError:
        return UserError(kind, found, allowed, f"{lines.path}:{number + text.count(chr(10), at, end)}")

    while True:
        sign = _BEFORE_RECORD.match(text, at)
        try:
            if sign is None or (sign[1] == "[") != first:
                raise json.JSONDecodeError("no list of records", text, at)
            record, end = _JSON.raw_decode(text, sign.end())
            # A number at the buffer's end may continue in the next chunk: read more before accepting it.
            if end == len(text) and not done:
                raise json.JSONDecodeError("it goes on", text, end)
        except (ValueError, RecursionError) as error:
            if done and _END_OF_ARRAY.fullmatch(text, at):
                return
            if done or len(text) - at > MAX_TEXT:
                allowed = f"a list of records of at most {MAX_TEXT / 2**20:g} MiB"
                reason = getattr(error, "msg", error)
                raise refusal(
                    "broken JSON", text[at : at + 60], f"{allowed} ({reason})", getattr(error, "pos", at)
                ) from None
            try:
                # The buffer doubles with each try, so a large record is parsed only a few times.
                data = lines.some(max(_CHUNK, len(text) - at))
                text, at, done = text[at:] + decode(data, final=not data), 0, not data
            except UnicodeDecodeError as wrong:
                raise refusal("not UTF-8", wrong.object[wrong.start : wrong.end], "UTF-8 text", len(text)) from None
            except BadLine as bad:
                raise refusal(bad.kind, bad.found, bad.allowed, len(text)) from None
            continue
        number += text.count("\n", at, sign.end())
        what = record if isinstance(record, dict) else BadLine("no JSON object", record, "a list of JSON objects")
        yield f"{lines.path}:{number}", what
        number += text.count("\n", sign.end(), end)
        at, first = end, False


def _of_csv(lines: _Lines, tabs: bool) -> Iterator[Row]:
    csv.field_size_limit(MAX_TEXT)
    texts = map(_decoded, lines)
    try:
        header = next((text for text in texts if text.strip()), "")
    except BadLine as bad:
        yield lines.where, bad
        return
    delimiter = "\t" if tabs else delimiter_of(header)
    reader = csv.reader(chain([header], texts), delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    needed: list[str] = []
    while True:
        try:
            row = next(reader)
            if not row:
                continue
            if columns is None:
                columns = _columns(row, lines.where)
                needed = needed_columns(lines.config, columns)
                continue
            if len(row) != len(columns):
                raise BadLine("wrong number of cells", len(row), f"{len(columns)}, as the first row has")
            yield lines.where, _cells(dict(zip(columns, row, strict=True)), needed, delimiter, lines.config)
        except StopIteration:
            return
        except csv.Error as error:
            yield lines.where, BadLine("broken CSV", f"no row ({error})", "quoted cells that end, and no NUL")
        except BadLine as bad:
            yield lines.where, bad
            if not needed:  # a bad header makes every row unusable
                return


def _columns(row: list[str], where: str) -> list[str]:
    """Column names from the first row. A column without a name, such as pandas' index, is skipped."""
    columns = [name.strip() for name in row]
    named = [name for name in columns if name]
    if len({*named}) < len(named) or not named:
        raise UserError("columns", columns, "a first row with another name for every column", where)
    return columns


def _cells(row: dict[str, str], needed: list[str], delimiter: str, config: DataConfig) -> dict[str, str | None]:
    """The needed cells; all others are None. Raises: BadLine for a decimal comma without data.decimal_comma."""
    found, wrong = read_cells({name: row[name] for name in needed}, delimiter, config.decimal_comma)
    if wrong is not None:
        allowed = f"a decimal point in the column {wrong!r}, or data.decimal_comma: true"
        raise BadLine("decimal comma", found[wrong], allowed)
    return dict.fromkeys(row) | found
