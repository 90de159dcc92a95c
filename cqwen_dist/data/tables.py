"""Tables with named columns: Parquet files and everything that `datasets` loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc

from cqwen_dist.config.data import DataConfig
from cqwen_dist.config.errors import BadLine, UserError, reason_of
from cqwen_dist.data.cells import shortened
from cqwen_dist.data.records import Block, Row, needed_columns

_AT_ONCE = 16  # rows read at a time: a dictionary of one large value makes 1,000 rows of gigabytes out of 299 bytes


def of_parquet(path: Path, config: DataConfig, rows: int, size: int) -> Iterator[Block]:
    """Yield a file's blocks. rows: maximum per block; size: bytes after which a block ends."""
    import pyarrow.parquet

    number = 1
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            fields = needed_columns(config, file.schema_arrow.names, str(path))
            unread = dict.fromkeys(name for name in file.schema_arrow.names if name not in fields)
            held: list[pyarrow.RecordBatch] = []
            for batch in file.iter_batches(batch_size=_AT_ONCE, columns=fields, use_threads=False):
                held.append(batch)
                if sum(part.num_rows for part in held) >= rows or sum(part.nbytes for part in held) >= size:
                    table, held = pyarrow.Table.from_batches(held), []
                    yield partial(_table_rows, str(path), number, table, unread)
                    number += table.num_rows
            if held:
                yield partial(_table_rows, str(path), number, pyarrow.Table.from_batches(held), unread)
    except BadLine as bad:
        yield partial(list, [(str(path), bad)])
    except pyarrow.ArrowException as error:
        yield partial(list, [(f"{path}:{number}", _broken_table(error))])


def of_arrow(path: Path, config: DataConfig, rows: int) -> Iterator[Block]:
    """Yield the blocks of a file in Arrow's file format (Feather) or stream format. rows: maximum per block."""
    number = 1
    try:
        with pyarrow.memory_map(str(path)) as file:
            try:
                table = pyarrow.ipc.open_file(file).read_all()
            except pyarrow.ArrowInvalid:
                table = pyarrow.ipc.open_stream(file).read_all()
        fields = needed_columns(config, table.column_names, str(path))
        unread = dict.fromkeys(name for name in table.column_names if name not in fields)
        for start in range(0, table.num_rows, rows):
            yield partial(_table_rows, str(path), start + 1, table.select(fields).slice(start, rows), unread)
            number = start + 1
    except BadLine as bad:
        yield partial(list, [(str(path), bad)])
    except pyarrow.ArrowException as error:
        yield partial(list, [(f"{path}:{number}", _broken_table(error, "an Arrow file"))])


def _table_rows(name: str, first: int, batch: pyarrow.Table, unread: dict[str, None]) -> Iterator[Row]:
    """Rows of a batch. unread: the names of columns that were not read, so that they can be counted."""
    try:
        records = batch.to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        yield f"{name}:{first}", _broken_table(error)
        return
    for number, record in enumerate(short_floats(records, batch.schema), first):
        yield f"{name}:{number}", record | unread


def _broken_table(error: Exception, allowed: str = "a Parquet file") -> BadLine:
    kind = "broken Parquet" if "Parquet" in allowed else "broken Arrow"
    return BadLine(kind, f"no readable table ({reason_of(error, 100)})", allowed)


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
