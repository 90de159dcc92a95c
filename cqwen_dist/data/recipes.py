"""Recognises a data file from its first records, and returns the `data` keys to read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from cqwen_dist.config.data import QUESTION_AND_ANSWER, RECIPES, DataConfig, can_be_named, column_lines
from cqwen_dist.config.errors import UserError
from cqwen_dist.data.blocks import blocks
from cqwen_dist.data.cells import BadLine, as_number, is_missing
from cqwen_dist.data.records import Text

RECORDS = 200  # number of records to inspect


class DataRecipe(NamedTuple):
    """name: kind of records, for people. keys: for `data`. length: 95th percentile of text length in characters."""

    name: str
    keys: dict[str, Any]
    length: int


def recognise(source: str, target: str | None = None) -> DataRecipe:
    """Recipe for a source, from its first records. target: column whose number the model learns to write.

    Raises `UserError` for an empty source, or if no recipe fits.
    """
    records, extra = records_of(source, RECORDS)
    if not records:
        raise UserError("--data", source, "at least one record")
    if isinstance(records[0], Text):
        return DataRecipe("plain texts", {}, _length([text.text for text in records]))
    name, keys = _of_fields(records, source) if target is None else _of_target(records, target, source)
    return DataRecipe(name, keys | extra, _length([" ".join(map(str, record.values())) for record in records]))


def records_of(
    source: str, count: int | None = None, key: str = "--data", decimal_comma: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """First `count` records (None: all; text files give texts), and the `data` keys to read them.

    key: names the source in errors. decimal_comma: see data.decimal_comma; it is set automatically if a CSV with
    semicolons needs it. Raises `UserError`, also for a broken line.
    """
    keys = {"decimal_comma": True} if decimal_comma else {}
    try:
        return list(islice(_records(source, key, **keys), count)), keys
    except UserError as error:
        if error.key != "decimal comma":
            raise
        keys = {"decimal_comma": True}
        return list(islice(_records(source, key, **keys), count)), keys


def _records(source: str, key: str, **keys: Any) -> Iterator[Any]:
    for block in blocks(source, DataConfig(train=source, text_template="{*}", **keys), key):
        for where, record in block():
            if isinstance(record, BadLine):
                raise UserError(record.kind, record.found, record.allowed, where)
            yield {name: cell for name, cell in record.items() if name} if isinstance(record, Mapping) else record


def _of_fields(records: list[Any], source: str) -> tuple[str, dict[str, Any]]:
    """Recipe by the names and types of the fields that all records share."""
    shared = [name for name in records[0] if all(name in record for record in records)]

    def all_are(kind: Callable[[Any], bool]) -> list[str]:
        """Fields whose non-empty cells all satisfy `kind`. Empty cells are ignored here; reading reports them."""
        held = {name: [record[name] for record in records if record[name] not in (None, "", [])] for name in shared}
        return [name for name, cells in held.items() if cells and all(map(kind, cells))]

    # From the most specific kind of record to the least: a table with a text column is also a list of texts.
    if chats := all_are(_is_chat):
        return "chats", {"messages_field": chats[0]}
    if prompts := _of_prompts({*shared}, any("input" in record for record in records)):
        return prompts
    texts = all_are(lambda value: isinstance(value, str))
    if "text" in texts:
        return "plain texts", {}
    if numbers := [name for name in shared if _is_numeric(record[name] for record in records)]:
        return _of_target(records, numbers[-1], source)
    if texts:
        longest = max(texts, key=lambda name: sum(len(record[name] or "") for record in records))
        return f"texts in the field {longest}", {"text_field": longest}
    found = ", ".join(records[0])
    raise UserError("--data", found, "chats, instruction and output, question and answer, text, or a column of numbers")


def _of_prompts(shared: set[str], with_input: bool) -> tuple[str, dict[str, Any]] | None:
    """Recipe for prompts with answers, by field names."""
    if {"instruction", "output"} <= shared:
        return "instructions (Alpaca)", RECIPES["alpaca" if with_input else "instructions"]
    pairs = (pair for pair in QUESTION_AND_ANSWER if shared.issuperset(pair))
    return next(((f"{q}s and {a}s", RECIPES[f"{q}-{a}"]) for q, a in pairs), None)


def _of_target(records: list[Any], target: str, source: str) -> tuple[str, dict[str, Any]]:
    """Recipe for a table: each row becomes `column: cell` lines, with the target last."""
    usable = [name for name in records[0] if name != target and can_be_named(name)]
    _refuse_target(records, target, usable, source)
    keys = {
        "prompt_template": column_lines(usable),
        "text_template": f"{target}: {{{target}}}\n",
        "target_field": target,
    }
    empty = {name for record in records for name in (*usable, target) if is_missing(record.get(name))}
    if empty - {target}:
        keys["empty_cell"] = "unknown"
    if target in empty:
        keys["on_bad_line"] = "skip"
    return f"a table whose column {target} is written", keys


def _refuse_target(records: list[Any], target: str, usable: list[str], source: str) -> None:
    columns = ", ".join(records[0])
    if target not in records[0]:
        raise UserError("--target", target, f"a column of {source}: {columns}")
    if not usable or not can_be_named(target):
        raise UserError("--data", columns, f"{target} and a further column, without {{}}:! in their names", source)
    wrong = next((r[target] for r in records if not is_missing(r.get(target)) and as_number(r[target]) is None), None)
    if wrong is not None:
        raise UserError("--target", wrong, f"numbers in the column {target}")


def _is_chat(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and ("role" in message or "from" in message) for message in value)


def _is_numeric(cells: Iterable[Any]) -> bool:
    """Whether every cell is a number or empty, and at least one is a number."""
    held = [as_number(cell) for cell in cells if not is_missing(cell)]
    return bool(held) and None not in held


def _length(texts: list[str]) -> int:
    """95th percentile of text length, in characters."""
    return sorted(map(len, texts))[min(len(texts) - 1, int(0.95 * len(texts)))]


def columns_of(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """All field names, in order of first appearance."""
    return list(dict.fromkeys(name for record in records for name in record))


def records_in(source: str, decimal_comma: bool = False) -> list[Mapping[str, Any]]:
    """Records of a table. decimal_comma: see `records_of`. Raises `UserError`, also for an empty table."""
    records, _ = records_of(source, key="FILE", decimal_comma=decimal_comma)
    if not records or not isinstance(records[0], Mapping):
        raise UserError("FILE", source, "a table with a row or more: .csv, .parquet, or .jsonl with an object a line")
    return records
