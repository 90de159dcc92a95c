"""Where texts come from: JSONL files and bundled data, read lazily, every bad line named.

- `path.jsonl`: one JSON object a line, UTF-8. Its text is the string in `data.text_field`, or `data.text_template`
  filled with its fields (strings and numbers; numbers as they stand in the file; `\\n` and `\\t` in the template mean
  line break and tab). Empty lines are passed over. GSM8K's calculator marks `<<48/2=24>>` are removed unless
  `data.calculator_marks` keeps them.
- `bundled:diabetes`, `bundled:diabetes/train`, `bundled:diabetes/test`: see `cqwen_dist.data.diabetes`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.diabetes import diabetes_texts

# Sums alone: "cout << a; cin >> b" is no mark.
_MARKS = re.compile(r"<<[^<>A-Za-z;\n]*=[^<>A-Za-z;\n]*>>")
_BUNDLED: dict[str, Callable[[], list[str]]] = {
    "diabetes": lambda: diabetes_texts("train") + diabetes_texts("test"),
    "diabetes/train": lambda: diabetes_texts("train"),
    "diabetes/test": lambda: diabetes_texts("test"),
}


class Text(NamedTuple):
    """One text and the place it came from, `file:line` or `bundled:name:number`."""

    text: str
    where: str


@dataclass
class ReadReport:
    """How reading went: texts read, and lines skipped by kind with the first of each."""

    read: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def skip(self, kind: str, where: str) -> None:
        """Counts a bad line."""
        self.skipped[kind] = self.skipped.get(kind, 0) + 1
        self.first.setdefault(kind, where)

    def lines(self) -> list[str]:
        """One line for each kind of bad line; none when all was well."""
        return [f"skipped: {count:,} x {kind}, first at {self.first[kind]}" for kind, count in self.skipped.items()]


class _BadLine(Exception):
    """A line that cannot be used: kind (counted), what was found, what is allowed."""

    def __init__(self, kind: str, found: object, allowed: str) -> None:
        super().__init__(kind)
        self.kind, self.found, self.allowed = kind, found, allowed


class _Literal(str):
    """A JSON number as it stands in the file: no digit is lost on the way into a template."""


def read_texts(source: str, config: DataConfig, report: ReadReport, key: str = "data.train") -> Iterator[Text]:
    """The texts of one source in order.

    Raises: UserError for a file that is missing or no file, an unknown bundled name, and, unless
    config.on_bad_line is skip (then they are counted in `report`), for lines that are no UTF-8, no JSON object, lack
    a field, hold something else than text, or are empty.
    """
    if source.startswith("bundled:"):
        name = source.removeprefix("bundled:")
        if name not in _BUNDLED:
            raise UserError(key, source, " or ".join(f"bundled:{known}" for known in _BUNDLED))
        for number, text in enumerate(_BUNDLED[name](), 1):
            report.read += 1
            yield Text(text, f"{source}:{number}")
        return
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(key, f"no file {source}", "an existing JSONL file, or bundled:NAME")
    extract = _extractor(config)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip(b"\xef\xbb\xbf \t\r\n"):
                    continue
                where = f"{path}:{number}"
                try:
                    text = extract(line)
                except _BadLine as bad:
                    if config.on_bad_line == "error":
                        raise UserError(bad.kind, bad.found, bad.allowed, where) from None
                    report.skip(bad.kind, where)
                else:
                    report.read += 1
                    yield Text(text, where)
    except OSError as error:
        raise UserError(key, source, f"a readable file ({error.strerror})") from None


def read_split(config: DataConfig, report: ReadReport) -> tuple[list[Text], list[Text]]:
    """The training texts (the first `config.limit`) and the held-out texts.

    Without `config.eval`, `eval_fraction` of the training texts are held out: those whose SHA-256 is smallest,
    whatever their order, at least one, and equal texts stay on one side.
    Raises: what `read_texts` raises; UserError when the held-out part would be all.
    """
    train = _read_all(config.train, config, report, "data.train", config.limit)
    if config.eval is not None:
        held_out = _read_all(config.eval, config, report, "data.eval", None)
        if not held_out:
            raise UserError("data.eval", "no usable text", "one text or more", str(config.eval))
        return train, held_out
    if not config.eval_fraction or not train:
        return train, []
    keys = [hashlib.sha256(text.text.encode()).digest() for text in train]
    last = sorted(keys)[math.ceil(config.eval_fraction * len(keys)) - 1]
    rest = [text for text, digest in zip(train, keys, strict=True) if digest > last]
    if not rest:
        raise UserError(
            "data.eval_fraction", config.eval_fraction, f"less, as {len(train)} texts leave none to train on"
        )
    return rest, [text for text, digest in zip(train, keys, strict=True) if digest <= last]


def _read_all(
    sources: str | list[str], config: DataConfig, report: ReadReport, key: str, limit: int | None
) -> list[Text]:
    texts: list[Text] = []
    for source in [sources] if isinstance(sources, str) else sources:
        for text in read_texts(source, config, report, key):
            texts.append(text)
            if len(texts) == limit:
                return texts
    return texts


def _extractor(config: DataConfig) -> Callable[[bytes], str]:
    """The function from a raw line to its text; raises `_BadLine`."""
    template = config.text_template
    if template is not None:
        template = template.replace("\\n", "\n").replace("\\t", "\t")
    names = [config.text_field] if template is None else _template_fields(template)

    def extract(line: bytes) -> str:
        record = _parse(line)
        for name in names:
            if name not in record:
                raise _BadLine("missing field", sorted(record), f"a JSON object with the field {name!r}")
            if type(record[name]) is not str and not (template is not None and isinstance(record[name], _Literal)):
                kind = "a string or a number" if template is not None else "a string"
                raise _BadLine("wrong type", record[name], f"{kind} in the field {name!r}")
        text = record[names[0]] if template is None else template.format(**{name: record[name] for name in names})
        if config.calculator_marks == "strip":
            text = _MARKS.sub("", text)
        if not text.strip():
            raise _BadLine("empty text", text, "a text that is not empty")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _BadLine("not Unicode text", text[error.start : error.end], "no lone surrogates") from None
        return text

    return extract


def _template_fields(template: str) -> list[str]:
    """The names between the braces. Raises: UserError for a template that text fields cannot fill."""
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
        template.format(**dict.fromkeys(names, "text"))
    except (ValueError, LookupError, AttributeError) as error:
        allowed = "JSON fields in braces, nothing else, such as '{question}'"
        raise UserError("data.text_template", template, f"{allowed} ({error})") from None
    return names


def _parse(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _BadLine("not UTF-8", error.object[error.start : error.end], "UTF-8 text") from None
    try:
        record = json.loads(text, parse_int=_Literal, parse_float=_Literal, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _BadLine("broken JSON", text.strip()[:60], f"one JSON object a line ({error})") from None
    if not isinstance(record, dict):
        raise _BadLine("no JSON object", text.strip()[:60], 'one JSON object a line, such as {"text": "..."}')
    return record


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
