"""Files cut into blocks of records. A block is read by itself, in any process, so that many can be read at once.

The process that cuts does little: of JSON and of a text a line it looks for line ends, of Parquet it takes record
batches; parsing is the block's own work. What cannot be cut without being read (CSV, whose quoted cells may hold line
ends, paragraphs, `datasets`) is read here, row by row, and makes blocks of rows. Where blocks are cut depends on the
source alone.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from cqwen_dist.config import DataConfig, UserError, refuse_missing
from cqwen_dist.data.diabetes import diabetes_texts
from cqwen_dist.data.records import BadLine, Literal, Text, needed_fields, too_long

# A record and its place; or the place and why there is none; or a text that is ready.
Row = tuple[str, "Mapping[str, Any] | BadLine | Text"]
# Rows that can be had in any process: a function of a module with its arguments.
Block = Callable[[], Iterable[Row]]

BLOCK = 1 << 20  # bytes of lines, about
_ROWS = 1000  # of a table, at most
_BUNDLED: dict[str, Callable[[], list[str]]] = {
    "diabetes": lambda: diabetes_texts("train") + diabetes_texts("test"),
    "diabetes/train": lambda: diabetes_texts("train"),
    "diabetes/test": lambda: diabetes_texts("test"),
}


def blocks(source: str, config: DataConfig, key: str) -> Iterator[Block]:
    """A source's blocks in order. Raises: UserError for a source that is missing or cannot be read."""
    name, _, split = source.partition("#")
    path = Path(name).expanduser()
    try:
        if source.startswith("bundled:"):
            yield _bundled(source, key)
        elif source.startswith("hf:") or path.is_dir():
            yield from _of_rows(_of_datasets(source, name, split or "train", config, key))
        else:
            yield from _of_file(Path(source).expanduser(), source, config, key)
    except OSError as error:
        raise UserError(key, source, f"a readable file ({error.strerror or error})") from None


def given(rows: list[Row]) -> list[Row]:
    """A block of rows that are there already."""
    return rows


def _bundled(source: str, key: str) -> Block:
    name = source.removeprefix("bundled:")
    if name not in _BUNDLED:
        raise UserError(key, source, " or ".join(f"bundled:{known}" for known in _BUNDLED))
    places = ((f"{source}:{number}", text) for number, text in enumerate(_BUNDLED[name](), 1))
    return partial(given, [(where, Text(text, where)) for where, text in places])


def _of_file(path: Path, source: str, config: DataConfig, key: str) -> Iterator[Block]:
    refuse_missing(source, key)
    suffixes = [suffix.lower() for suffix in path.suffixes]
    ending = suffixes[-2] if len(suffixes) > 1 and suffixes[-1] == ".gz" else (suffixes or [""])[-1]
    if ending == ".parquet":
        yield from _of_parquet(path, config)
        return
    with gzip.open(path, "rb") if suffixes[-1:] == [".gz"] else path.open("rb") as file:
        lines = _Lines(cast(IO[bytes], file), path, config)
        if ending in (".csv", ".tsv"):
            yield from _of_rows(_of_csv(lines))
        elif ending != ".txt":
            yield from _of_lines(lines, _json_rows)
        elif config.sample_by == "line":
            yield from _of_lines(lines, partial(_text_rows, config.text_field))
        else:
            yield from _of_rows(_of_text(lines, config))


def _of_rows(rows: Iterator[Row]) -> Iterator[Block]:
    held: list[Row] = []
    size = 0
    for row in rows:
        held.append(row)
        size += _size(row[1])
        if len(held) == _ROWS or size >= BLOCK:
            yield partial(given, held)
            held, size = [], 0
    if held:
        yield partial(given, held)


def _size(value: object) -> int:
    """Characters, or numbers, in a record."""
    if isinstance(value, (Mapping, list, tuple)):
        return sum(map(_size, value.values() if isinstance(value, Mapping) else value))
    return len(value) if isinstance(value, str) else 1


# ----------------------------------------------------------------------------------------------------------- lines


class _Lines:
    """The lines of a file with their numbers. Instead of a line that is too long, which is never held, and of what a
    broken compressed file ends with, `BadLine` is raised, once each."""

    def __init__(self, file: IO[bytes], path: Path, config: DataConfig) -> None:
        self.file, self.path, self.config, self.number = file, path, config, 0
        self.limit = int(config.max_text_mib * 2**20)
        self._broken = False

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> bytes:
        line = self._read(self.limit + 1)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > self.limit and not line.endswith(b"\n"):
            size = len(line)
            while line and not line.endswith(b"\n"):
                line = self._read(self.limit)
                size += len(line)
            raise too_long(size, self.config)
        return line

    def _read(self, limit: int) -> bytes:
        if self._broken:
            return b""
        try:
            return self.file.readline(limit)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self._broken = True
            self.number += 1
            raise BadLine("broken gzip", f"no whole file ({error})", "a whole gzip file") from None

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"


def _of_lines(lines: _Lines, rows: Callable[[str, int, bytes], Iterator[Row]]) -> Iterator[Block]:
    """Blocks of whole lines; `rows` makes rows of the file's name, the first line's number, and the lines."""
    held: list[bytes] = []
    size, more = 0, True
    while more:
        bad: list[Row] = []
        try:
            line = next(lines)
            held.append(line)
            size += len(line)
        except StopIteration:
            more = False
        except BadLine as error:
            bad = [(lines.where, error)]
        if held and (size >= BLOCK or bad or not more):
            yield partial(rows, str(lines.path), lines.number - len(bad) - len(held) + 1, b"".join(held))
            held, size = [], 0
        if bad:
            yield partial(given, bad)


def _json_rows(name: str, first: int, data: bytes) -> Iterator[Row]:
    for number, line in enumerate(io.BytesIO(data), first):
        if line.strip(b"\xef\xbb\xbf \t\r\n"):
            try:
                yield f"{name}:{number}", _parsed(line)
            except BadLine as bad:
                yield f"{name}:{number}", bad


def _parsed(line: bytes) -> dict[str, Any]:
    text = _decoded(line)
    try:
        record = json.loads(text, parse_int=Literal, parse_float=Literal, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadLine("broken JSON", text.strip()[:60], f"one JSON object a line ({error})") from None
    if not isinstance(record, dict):
        raise BadLine("no JSON object", text.strip()[:60], 'one JSON object a line, such as {"text": "..."}')
    return record


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadLine("not UTF-8", error.object[error.start : error.end], "UTF-8 text") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _text_rows(field: str, name: str, first: int, data: bytes) -> Iterator[Row]:
    for number, line in enumerate(io.BytesIO(data), first):
        try:
            text = _decoded(line)
        except BadLine as bad:
            yield f"{name}:{number}", bad
            continue
        if text.strip():
            yield f"{name}:{number}", {field: text.strip("\r\n")}


def _of_text(lines: _Lines, config: DataConfig) -> Iterator[Row]:
    """Paragraphs, or the whole file."""
    held: list[str] = []
    size, began, done = 0, 1, False
    while not done:
        text = ""
        try:
            text = _decoded(next(lines))
            size += len(text)
            if size > lines.limit:
                held, size = [], 0
                raise too_long(lines.limit, config)
        except StopIteration:
            done = True
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


def _of_csv(lines: _Lines) -> Iterator[Row]:
    tabs = ".tsv" in [suffix.lower() for suffix in lines.path.suffixes]
    csv.field_size_limit(max(lines.limit, 2**17))
    reader = csv.reader(map(_decoded, lines), delimiter="\t" if tabs else ",", strict=True)
    columns: list[str] | None = None
    while True:
        try:
            row = next(reader)
            if not row:
                continue
            if columns is None:
                columns = [name.strip() for name in row]
                if len(set(columns)) < len(columns) or not all(columns):
                    raise UserError("columns", columns, "a first row that gives every column a name", lines.where)
                continue
            if len(row) != len(columns):
                raise BadLine("wrong number of cells", len(row), f"{len(columns)}, as the first row has")
            yield lines.where, dict(zip(columns, row, strict=True))
        except StopIteration:
            return
        except csv.Error as error:
            yield lines.where, BadLine("broken CSV", f"no row ({error})", "quoted cells that end, and no NUL")
        except BadLine as bad:
            yield lines.where, bad


# ---------------------------------------------------------------------------------------------------------- tables


def _of_parquet(path: Path, config: DataConfig) -> Iterator[Block]:
    import pyarrow
    import pyarrow.parquet

    number = 1
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            fields = needed_fields(config)
            missing = [name for name in fields if name not in file.schema_arrow.names]
            if missing:
                allowed = f"a table with the column {missing[0]!r}"
                raise BadLine("missing field", file.schema_arrow.names, allowed)
            for batch in file.iter_batches(batch_size=_ROWS, columns=fields, use_threads=False):
                sink = pyarrow.BufferOutputStream()
                with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
                    writer.write_batch(batch)
                yield partial(_table_rows, str(path), number, sink.getvalue().to_pybytes())
                number += batch.num_rows
    except BadLine as bad:
        yield partial(given, [(str(path), bad)])
    except pyarrow.ArrowException as error:
        yield partial(given, [(f"{path}:{number}", _broken_table(error))])


def _table_rows(name: str, first: int, data: bytes) -> Iterator[Row]:
    import pyarrow

    try:
        records = pyarrow.ipc.open_stream(data).read_all().to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        yield f"{name}:{first}", _broken_table(error)
        return
    for number, record in enumerate(records, first):
        yield f"{name}:{number}", record


def _broken_table(error: Exception) -> BadLine:
    reason = " ".join(str(error).split())[:100]
    return BadLine("broken Parquet", f"no readable table ({reason})", "a Parquet file")


def _of_datasets(source: str, name: str, split: str, config: DataConfig, key: str) -> Iterator[Row]:
    import datasets

    try:
        data = _opened(source, name, split, key)
        fields = needed_fields(config)
        if data.column_names is not None:
            missing = [field for field in fields if field not in data.column_names]
            if missing:
                allowed = f"a data set with the column {missing[0]!r}"
                yield source, BadLine("missing field", data.column_names, allowed)
                return
            data = data.select_columns(fields)
        for number, record in enumerate(data, 1):
            yield f"{source}:{number}", record
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(key, source, f"what `datasets` can load ({reason})") from None


def _opened(source: str, name: str, split: str, key: str) -> Any:
    """A split of the hub's data set (or a folder's files), streamed; or of a folder that `save_to_disk` wrote."""
    import datasets

    if source.startswith("hf:"):
        parts = name.removeprefix("hf:").split("/")
        local = Path(name.removeprefix("hf:")).expanduser().is_dir()
        cut = len(parts) if local else 2
        return datasets.load_dataset("/".join(parts[:cut]), "/".join(parts[cut:]) or None, split=split, streaming=True)
    folder = Path(name).expanduser()
    if not any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
        return datasets.load_dataset(str(folder), split=split, streaming=True)
    data = datasets.load_from_disk(str(folder))
    if not isinstance(data, datasets.DatasetDict):
        return data
    if split not in data:
        raise UserError(key, source, f"{name}# and one of {', '.join(data)}")
    return data[split]
