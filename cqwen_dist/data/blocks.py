"""The rows of a source, in blocks, so that multiple processes can turn them into tokens."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import pyarrow
import pyarrow.ipc

from cqwen_dist.config.data import DataConfig, source_files
from cqwen_dist.config.errors import BadLine, Said, UserError, reason_of
from cqwen_dist.data.cells import shortened
from cqwen_dist.data.records import Block, Row, Text, needed_columns
from cqwen_dist.data.text_files import Lines, decoded, json_record, no_records, of_array, of_csv, opened, whole
from cqwen_dist.wings import from_wing

T = TypeVar("T")
BLOCK = 1 << 20  # approximate characters per block
_ROWS = 1000  # maximum rows per block
_SHEETS = (".xlsx", ".xlsm", ".xls", ".ods", ".numbers")
_BUNDLED = {"diabetes": ("train", "test"), "diabetes/train": ("train",), "diabetes/test": ("test",)}


def blocks(source: str, config: DataConfig, key: str) -> Iterator[Block]:
    """Yield a source's rows in order, in blocks. Raises: UserError for a missing or unreadable source."""
    for one in source_files(source, key):
        path = Path(one).expanduser()
        try:
            if one.startswith("bundled:"):
                rows = _bundled(one, key)
            elif path.is_file() and not one.startswith("hf:"):
                rows = _of_file(path, config, key)
            else:
                rows = of_datasets(one, config, key)
            yield from in_blocks(map(_sized, rows), _ROWS, BLOCK)
        except OSError as error:
            raise UserError(key, one, f"a readable file ({error.strerror or error})") from None


def _bundled(source: str, key: str) -> Iterator[Row]:
    name = source.removeprefix("bundled:")
    if name not in _BUNDLED:
        raise UserError(key, source, " or ".join(f"bundled:{known}" for known in _BUNDLED))
    texts_of = from_wing("bundled:diabetes")
    texts = enumerate(chain.from_iterable(map(texts_of, _BUNDLED[name])), 1)
    return ((f"{source}:{number}", Text(text, f"{source}:{number}")) for number, text in texts)


def _of_file(path: Path, config: DataConfig, key: str) -> Iterator[Row]:
    ending = Path(path.name.lower().removesuffix(".gz")).suffix
    if ending in _SHEETS:
        raise UserError(key, str(path), "text, JSONL, CSV or Parquet: save the sheet as a .csv in UTF-8")
    if ending in (".parquet", ".arrow", ".feather", ".ipc"):
        yield from of_columns(path, config)
        return
    with opened(path) as file:
        lines = Lines(file, path, config)
        if ending in (".csv", ".tsv"):
            yield from of_csv(lines, ending == ".tsv")
        elif ending == ".json" and lines.begin_with(b"["):
            yield from of_array(lines)
        elif ending == ".json" and (record := whole(lines)) is not None:
            yield f"{path}:1", no_records(record) or record
        else:
            for line in lines:
                try:
                    if (text := decoded(line)).strip():
                        is_text = ending == ".txt"
                        yield lines.where, {config.text_field: text.strip("\r\n")} if is_text else json_record(text)
                except BadLine as bad:
                    yield lines.where, bad


def in_blocks(items: Iterable[tuple[T, int]], most: int, largest: int) -> Iterator[list[T]]:
    """Yield lists of at most `most` of the items, which come with their sizes, fewer if the sizes reach `largest`."""
    held: list[T] = []
    size = 0
    for item, own in items:
        held.append(item)
        size += own
        if len(held) == most or size >= largest:
            yield held
            held, size = [], 0
    if held:
        yield held


def _sized(row: Row) -> tuple[Row, int]:
    try:
        return row, _size(row[1])
    except RecursionError:
        return (row[0], BadLine("broken JSON", Said("values nested too deep"), "a few levels")), 0


def _size(value: object) -> int:
    """Number of characters (or numbers) in a record."""
    if isinstance(value, (Mapping, list, tuple)):
        return sum(map(_size, value.values() if isinstance(value, Mapping) else value))
    return len(value) if isinstance(value, str) else 1


# ------------------------------------------------------------------ tables with named columns, and all of `datasets`

_AT_ONCE = 16  # rows read at a time: a dictionary of one large value makes 1,000 rows of gigabytes out of 299 bytes


def of_columns(path: Path, config: DataConfig) -> Iterator[Row]:
    """Yield the rows of a Parquet file, or of one in Arrow's file format (Feather) or stream format."""
    number, kind = 1, "Parquet" if path.suffix.lower() == ".parquet" else "Arrow"
    try:
        with _opened_columns(path, kind) as (columns, batches_of):
            fields = needed_columns(config, columns, str(path))
            unread = dict.fromkeys(name for name in columns if name not in fields)  # so that they can be counted
            for batch in batches_of(fields):
                for record in short_floats(batch.to_pylist(), batch.schema):
                    yield f"{path}:{number}", record | unread
                    number += 1
    except BadLine as bad:
        yield str(path), bad
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        allowed = f"{'a' if kind == 'Parquet' else 'an'} {kind} file"
        yield f"{path}:{number}", BadLine(f"broken {kind}", f"no readable table ({reason_of(error, 100)})", allowed)


@contextmanager
def _opened_columns(path: Path, kind: str) -> Iterator[tuple[list[str], Callable[[list[str]], Iterable[Any]]]]:
    """The names of a file's columns, and a function from some of them to their record batches."""
    if kind == "Parquet":
        from pyarrow.parquet import ParquetFile

        with ParquetFile(path) as file:
            read = partial(file.iter_batches, batch_size=_AT_ONCE, use_threads=False)
            yield file.schema_arrow.names, lambda fields: read(columns=fields)
        return
    with pyarrow.memory_map(str(path)) as memory:
        try:
            table = pyarrow.ipc.open_file(memory).read_all()
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_stream(memory).read_all()
        yield table.column_names, lambda fields: table.select(fields).to_batches(_AT_ONCE)


def of_datasets(source: str, config: DataConfig, key: str) -> Iterator[Row]:
    """Yield rows from a folder or hub data set. `#SPLIT` after its name selects a split (default train).

    Raises: UserError if `datasets` cannot load it.
    """
    import datasets

    name, _, split = source.partition("#")
    try:
        data = _opened(source, name, split or "train", key)
        unread: dict[str, None] = {}
        if data.column_names is not None:
            fields = needed_columns(config, data.column_names, source)
            unread = dict.fromkeys(name for name in data.column_names if name not in fields)
            data = data.select_columns(fields)
        for number, record in enumerate(short_floats(data, data.features and data.features.arrow_schema), 1):
            yield f"{source}:{number}", record | unread
    except BadLine as bad:
        yield source, bad
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(key, source, f"what `datasets` can load ({reason_of(error)})") from None


def short_floats(records: Iterable[Any], schema: pyarrow.Schema | None) -> Iterator[Any]:
    """The records with each float32 or less, also in lists and objects, in its shortest decimal form."""
    columns = [field for field in schema or () if "float" in str(field.type)]
    return ({**record, **{f.name: _short(record[f.name], f.type) for f in columns}} for record in records)


def _short(value: Any, kind: pyarrow.DataType) -> Any:
    if value is None or pyarrow.types.is_floating(kind):
        return value if pyarrow.types.is_float64(kind) else shortened(value, kind.to_pandas_dtype())
    if pyarrow.types.is_struct(kind):
        return {field.name: _short(value[field.name], field.type) for field in kind}
    if pyarrow.types.is_dictionary(kind):
        return _short(value, kind.value_type)
    return [_short(inner, kind.value_type) for inner in value] if isinstance(value, list) else value


def _opened(source: str, name: str, split: str, key: str) -> Any:
    """A split from the hub or from a folder's files, streamed; or from a folder written by `save_to_disk`."""
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
