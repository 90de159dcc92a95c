"""Records of JSON files: an object a line, a list of objects, or one object."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cqwen_dist.config.errors import BadLine, Said, UserError
from cqwen_dist.data.cells import Literal
from cqwen_dist.data.lines import Lines
from cqwen_dist.data.records import MAX_TEXT, Row

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
    for name, value in record.items():
        if isinstance(value, list) and len(value) > 1 and all(map(_is_row, value)):
            found = Said(f"one object with the records under the key {name}")
            return BadLine("no list of records", found, "the list by itself: [{...}, {...}], or one object a line")
    values = [value for value in record.values() if isinstance(value, (list, dict)) and len(value) > 1]
    sizes = {tuple(value) if isinstance(value, dict) else len(value) for value in values}
    if len(values) < 2 or len(values) < len(record) or len(sizes) > 1:
        return None
    how = "a list" if isinstance(values[0], list) else "an object of rows"
    found = Said(f"one object with {how} for each column{', as pandas writes it' * (how != 'a list')}")
    return BadLine("no list of records", found, "a list of records: df.to_json(FILE, orient='records')")


def _is_row(value: object) -> bool:
    """Whether it is an object, and no message of a chat."""
    return isinstance(value, dict) and "role" not in value and "from" not in value


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
