"""A record (a JSON object, a row of a table) to one text, and to what of it is learnt.

Plain text; a template over the record's fields; a prompt in front that is read but not learnt; a chat of which the
assistant's turns are learnt; a table's row of which one field is the regression's target.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, NamedTuple

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.chat import BadChat, Chat, Spans

# Sums alone: "cout << a; cin >> b" is no mark.
_MARKS = re.compile(r"<<[^<>A-Za-z;\n]*=[^<>A-Za-z;\n]*>>")


class Text(NamedTuple):
    """One text and the place it came from, `file:line` or `bundled:name:number`.

    learnt: the characters [start, end) that are learnt, in order; None: all, and the end of the text. target: the
    characters within which numbers are the regression's; None: as data.numeric_targets says. labels: words of which it
    is known whether they come next, behind the text (seed S4 3.3.1). typed: the characters within which numbers are
    of type 1, 2, ...; more: further values of the target.
    """

    text: str
    where: str
    learnt: Spans | None = None
    target: tuple[int, int] | None = None
    labels: tuple[tuple[str, bool], ...] = ()
    typed: Spans = ()
    more: tuple[float, ...] = ()


@dataclass
class ReadReport:
    """How reading went: texts read, texts left out as they were there already, lines skipped by kind with the first."""

    read: int = 0
    duplicates: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def skip(self, kind: str, where: str) -> None:
        """Counts a bad line."""
        self.skipped[kind] = self.skipped.get(kind, 0) + 1
        self.first.setdefault(kind, where)

    def add(self, other: ReadReport) -> None:
        """What was read behind this."""
        self.read += other.read
        self.duplicates += other.duplicates
        for kind, count in other.skipped.items():
            self.skipped[kind] = self.skipped.get(kind, 0) + count
            self.first.setdefault(kind, other.first[kind])

    def lines(self) -> list[str]:
        """One line for each kind of bad line; none when all was well."""
        lines = [f"skipped: {count:,} x {kind}, first at {self.first[kind]}" for kind, count in self.skipped.items()]
        return [*lines, f"left out: {self.duplicates:,} equal texts"] if self.duplicates else lines


class BadLine(Exception):
    """A line or record that cannot be used: kind (counted), what was found, what is allowed."""

    def __init__(self, kind: str, found: object, allowed: str) -> None:
        super().__init__(kind, found, allowed)
        self.kind, self.found, self.allowed = kind, found, allowed


class Literal(str):
    """A JSON number as it stands in the file: no digit is lost on the way into a template."""


Extract = Callable[[Mapping[str, Any], str], Text]


def needed_fields(config: DataConfig) -> list[str]:
    """The fields of a record that become text; columns that are not named need not be read."""
    if config.messages_field is not None:
        return [config.messages_field]
    names = _template_fields("data.prompt_template", _unescaped(config.prompt_template))
    template = _unescaped(config.text_template)
    names += [config.text_field] if template is None else _template_fields("data.text_template", template)
    names += config.more_values
    names += [config.labels_field] if config.labels_field is not None else []
    return list(dict.fromkeys(names))


def extractor(config: DataConfig, chat: Chat) -> Extract:
    """The function from a record and its place to its text; it raises `BadLine`."""
    template, prompt_template = _unescaped(config.text_template), _unescaped(config.prompt_template)
    needed_fields(config)
    limit = int(config.max_text_mib * 2**20)
    fields = {name for name in (config.target_field, *config.number_types) if name is not None}
    located = sorted(fields, key=lambda name: (template or "").index(f"{{{name}}}"))

    def clean(text: str) -> str:
        return _MARKS.sub("", text) if config.calculator_marks == "strip" else text

    def compose(record: Mapping[str, Any]) -> tuple[str, Spans | None, dict[str, tuple[int, int]]]:
        if config.messages_field is not None:
            try:
                return *chat(_field(record, config.messages_field)), {}
            except BadChat as error:
                raise BadLine("no chat", error.found, error.allowed) from None
        spans: dict[str, tuple[int, int]] = {}
        if template is None:
            text = _field(record, config.text_field)
            if type(text) is not str:
                raise BadLine("wrong type", text, f"a string in the field {config.text_field!r}")
            text = clean(text)
        else:
            text, spans = _located(template, located, record, clean, config.empty_cell)
        if not text.strip():
            raise BadLine("empty text", text, "a text that is not empty")
        if prompt_template is None:
            return text, None, spans
        prompt = clean(_filled(prompt_template, record, config.empty_cell))
        moved = {name: (start + len(prompt), end + len(prompt)) for name, (start, end) in spans.items()}
        return prompt + text, ((len(prompt), len(prompt) + len(text)),), moved

    def extract(record: Mapping[str, Any], where: str) -> Text:
        text, learnt, spans = compose(record)
        try:
            size = len(text) if text.isascii() else len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise BadLine("not Unicode text", text[error.start : error.end], "no lone surrogates") from None
        if size > limit:
            raise too_long(size, config)
        return Text(
            text,
            where,
            learnt,
            spans.get(config.target_field or ""),
            _labels(record.get(config.labels_field or "")),
            tuple(spans[name] for name in config.number_types),
            tuple(_number(record, name) for name in config.more_values),
        )

    return extract


def _located(
    template: str, names: list[str], record: Mapping[str, Any], clean: Callable[[str], str], empty: str | None
) -> tuple[str, dict[str, tuple[int, int]]]:
    """The template's text, and where in it (as NFC) each of some fields is, which are named in their order there."""
    text, rest, spans = "", template, {}
    for name in names:
        head, rest = _around(rest, name)
        cell = _field(record, name)
        if is_empty(cell):
            raise BadLine("empty cell", cell, f"a number in the field {name!r}")
        before = unicodedata.normalize("NFC", text + clean(_filled(head, record, empty)))
        text = unicodedata.normalize("NFC", before + _filled(f"{{{name}}}", record))
        spans[name] = (len(before), len(text))
    return text + clean(_filled(rest, record, empty)), spans


def _number(record: Mapping[str, Any], name: str) -> float:
    """A field of `data.more_values`, a number by itself."""
    found = _field(record, name)
    try:
        value = math.nan if isinstance(found, bool) else float(found)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise BadLine("wrong type", found, f"a number in the field {name!r}")
    return value


def _labels(found: Any) -> tuple[tuple[str, bool], ...]:
    """The words of a record's `data.labels_field` with whether they hold; None among them: not known, left out."""
    known = {} if found is None else found
    if not isinstance(known, Mapping) or not all(value is None or type(value) is bool for value in known.values()):
        raise BadLine("wrong labels", found, 'words with true or false, such as {" sweet": true, " cold": false}')
    return tuple((word, holds) for word, holds in known.items() if holds is not None)


def too_long(size: int, config: DataConfig) -> BadLine:
    """What a line or a text beyond the limit is."""
    found = f"no text of at most that: {size / 2**20:,.1f} MiB or more"
    return BadLine("text too long", found, f"at most {config.max_text_mib:g} MiB (data.max_text_mib)")


def _unescaped(template: str | None) -> str | None:
    return None if template is None else template.replace("\\n", "\n").replace("\\t", "\t")


def _around(template: str, name: str) -> tuple[str, str]:
    at = template.index(f"{{{name}}}")
    return template[:at], template[at + len(name) + 2 :]


def _field(record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        raise BadLine("missing field", sorted(record), f"a JSON object with the field {name!r}")
    return record[name]


def _filled(template: str, record: Mapping[str, Any], empty: str | None = None) -> str:
    """The template with a record's fields. empty: what stands for an empty cell; None: nothing, and a null is bad."""
    values = {}
    for _, name, _, _ in Formatter().parse(template):
        if name is None:
            continue
        value = _field(record, name)
        if is_empty(value) and empty is not None:
            value = empty
        elif is_empty(value) and value != "":
            raise BadLine("empty cell", value, f"something in the field {name!r} (or data.empty_cell)")
        usable = isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
        if not usable or isinstance(value, bool):
            raise BadLine("wrong type", value, f"a string or a number in the field {name!r}")
        # repr of a float is the shortest text that reads back as the same float64.
        values[name] = repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
    return template.format(**values)


def is_empty(value: object) -> bool:
    """Whether a cell holds nothing: null, no characters, or NaN."""
    return value is None or value == "" or value != value


def _template_fields(key: str, template: str | None) -> list[str]:
    """The names between the braces. Raises: UserError for a template that text fields cannot fill."""
    if template is None:
        return []
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
        template.format(**dict.fromkeys(names, "text"))
        if any(spec or conversion for _, _, spec, conversion in Formatter().parse(template)):
            raise ValueError("no format specification")
    except (ValueError, LookupError, AttributeError) as error:
        allowed = "JSON fields in braces, nothing else, such as '{question}'"
        raise UserError(key, template, f"{allowed} ({error})") from None
    return names
