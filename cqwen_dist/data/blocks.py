"""The rows of a source, in blocks, so that multiple processes can turn them into tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

from cqwen_dist.config.data import DataConfig, source_files
from cqwen_dist.config.errors import BadLine, Said, UserError
from cqwen_dist.data.records import Block, Row, Text
from cqwen_dist.data.tables import of_columns, of_datasets
from cqwen_dist.data.text_files import Lines, decoded, json_record, no_records, of_array, of_csv, opened, whole
from cqwen_dist.wings import from_wing

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
                yield from _in_blocks(_bundled(one, key))
            elif path.is_file() and not one.startswith("hf:"):
                yield from _in_blocks(_of_file(path, config, key))
            else:
                yield from _in_blocks(of_datasets(one, config, key))
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


def _in_blocks(rows: Iterator[Row]) -> Iterator[Block]:
    held: list[Row] = []
    size = 0
    for row in rows:
        try:
            size += _size(row[1])
        except RecursionError:
            row = row[0], BadLine("broken JSON", Said("values nested too deep"), "a few levels")
        held.append(row)
        if len(held) == _ROWS or size >= BLOCK:
            yield held
            held, size = [], 0
    if held:
        yield held


def _size(value: object) -> int:
    """Number of characters (or numbers) in a record."""
    if isinstance(value, (Mapping, list, tuple)):
        return sum(map(_size, value.values() if isinstance(value, Mapping) else value))
    return len(value) if isinstance(value, str) else 1
