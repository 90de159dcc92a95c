"""What the first records of a data file look like, and the keys of `data` that read such records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.blocks import blocks
from cqwen_dist.data.records import BadLine, Text, is_empty

Record = Mapping[str, Any]
RECORDS = 200  # that are looked at
_QUESTION_AND_ANSWER = (("question", "answer"), ("prompt", "completion"), ("prompt", "response"), ("input", "output"))


class DataRecipe(NamedTuple):
    """name: what the records are, for people. keys: of `data`. length: characters of nearly all texts."""

    name: str
    keys: dict[str, Any]
    length: int


def recognise(source: str, target: str | None = None) -> DataRecipe:
    """The recipe of a source by its first records. target: the column whose number is to be written.

    Raises `UserError` where there is no record, or none of the recipes reads them.
    """
    records = list(islice(records_of(source), RECORDS))
    if not records:
        raise UserError("--data", source, "at least one record")
    if isinstance(records[0], Text):
        return DataRecipe("plain texts", {}, _length([text.text for text in records]))
    name, keys = _of_fields(records, source) if target is None else _of_target(records, target, source)
    return DataRecipe(name, keys, _length([" ".join(map(str, record.values())) for record in records]))


def records_of(source: str) -> Iterator[Any]:
    """A source's records, or its texts where it is a text file. Raises `UserError`, at a broken line too."""
    path = Path(source.partition("#")[0]).expanduser()
    if path.suffix == ".parquet" and path.is_file():
        yield from _rows_of_parquet(path)
        return
    for block in blocks(source, DataConfig(train=source), "--data"):
        for where, record in block():
            if isinstance(record, BadLine):
                raise UserError(record.kind, record.found, record.allowed, where)
            yield record


def _rows_of_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=RECORDS):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError("--data", str(path), f"a Parquet file ({error})") from None


def _of_fields(records: list[Any], source: str) -> tuple[str, dict[str, Any]]:
    """By the names and kinds of the fields that all records have."""
    shared = [name for name in records[0] if all(name in record for record in records)]

    def all_are(kind: Callable[[Any], bool]) -> list[str]:
        return [name for name in shared if all(kind(record[name]) for record in records)]

    if chats := all_are(_is_chat):
        return "chats", {"messages_field": chats[0]}
    if {"instruction", "output"} <= {*shared}:
        prompt = "{instruction}\n{input}\n" if "input" in shared else "{instruction}\n"
        return "instructions (Alpaca)", {"prompt_template": prompt, "text_template": "{output}"}
    for question, answer in _QUESTION_AND_ANSWER:
        if {question, answer} <= {*shared}:
            keys = {"prompt_template": f"{{{question}}}\n", "text_template": f"{{{answer}}}"}
            return f"{question}s and {answer}s", keys
    texts = all_are(lambda value: isinstance(value, str))
    if "text" in texts:
        return "plain texts", {}
    if numbers := all_are(_is_number):
        return _of_target(records, numbers[-1], source)
    if texts:
        longest = max(texts, key=lambda name: sum(len(record[name]) for record in records))
        return f"texts in the field {longest}", {"text_field": longest}
    found = ", ".join(records[0])
    raise UserError("--data", found, "chats, instruction and output, question and answer, text, or a column of numbers")


def _of_target(records: list[Any], target: str, source: str) -> tuple[str, dict[str, Any]]:
    """A table's rows as `column: cell` lines, the target last."""
    columns = list(records[0])
    if target not in columns:
        raise UserError("--target", target, f"a column of {source}: {', '.join(columns)}")
    wrong = next((r[target] for r in records if not is_empty(r.get(target)) and not _is_number(r[target])), None)
    if wrong is not None:
        raise UserError("--target", wrong, f"numbers in the column {target}")
    usable = [name for name in columns if name != target and not set(name) & set("{}[].!:")]
    prompt = "".join(f"{name}: {{{name}}}\n" for name in usable)
    keys = {"prompt_template": prompt, "text_template": f"{target}: {{{target}}}\n", "target_field": target}
    empty = {name for record in records for name in (*usable, target) if is_empty(record.get(name))}
    if empty - {target}:
        keys["empty_cell"] = "unknown"
    if target in empty:
        keys["on_bad_line"] = "skip"
    return f"a table whose column {target} is written", keys


def _is_chat(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and ("role" in message or "from" in message) for message in value)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _length(texts: list[str]) -> int:
    """Characters that 95 of 100 texts do not exceed."""
    return sorted(map(len, texts))[min(len(texts) - 1, int(0.95 * len(texts)))]
