"""Files split into record blocks, so that multiple processes can read one file.

The splitting process does little: it splits JSON lines and text at line ends and takes Parquet's record batches. The
process that gets a block parses it. Formats that must be parsed to be split are read here, row by row, and become row
blocks: CSV (quoted cells may contain line ends), JSON arrays, paragraphs and `datasets`.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from cqwen_dist.config.data import DataConfig, source_files
from cqwen_dist.config.errors import BadLine, Said, UserError
from cqwen_dist.data.csv_rows import of_csv
from cqwen_dist.data.json_rows import json_line, no_records, of_array, whole
from cqwen_dist.data.lines import Lines, decoded
from cqwen_dist.data.records import MAX_TEXT, Block, Row, Text, too_long
from cqwen_dist.data.tables import of_arrow, of_datasets, of_parquet
from cqwen_dist.wings import from_wing

BLOCK = 1 << 20  # approximate bytes per block
_ROWS = 1000  # maximum table rows per block
_SHEETS = (".xlsx", ".xlsm", ".xls", ".ods", ".numbers")
_BUNDLED = {"diabetes": ("train", "test"), "diabetes/train": ("train",), "diabetes/test": ("test",)}
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
    if ending in (".arrow", ".feather", ".ipc"):
        yield from of_arrow(path, config, _ROWS)
        return
    with gzip.open(path, "rb") if name.endswith(".gz") else path.open("rb") as file:
        lines = Lines(file, path, config)
        if ending in (".csv", ".tsv"):
            yield from _of_rows(of_csv(lines, ending == ".tsv"))
        elif ending == ".json" and lines.begin_with(b"["):
            yield from _of_rows(of_array(lines))
        elif ending == ".json" and (record := whole(lines)) is not None:
            yield partial(list, [(f"{path}:1", no_records(record) or record)])
        elif ending != ".txt":
            yield from _of_lines(lines, json_line)
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


def _of_lines(lines: Lines, parsed: ParsedLine) -> Iterator[Block]:
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


def _text_line(field: str, line: bytes) -> Mapping[str, Any] | None:
    text = decoded(line)
    return {field: text.strip("\r\n")} if text.strip() else None


def _of_text(lines: Lines, config: DataConfig) -> Iterator[Row]:
    """Yield paragraphs, or the file as one text."""
    held: list[str] = []
    size, began = 0, 1
    for line in chain(lines, [None]):  # None marks the end
        done = line is None
        try:
            text = "" if line is None else decoded(line).replace("\r\n", "\n")
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
