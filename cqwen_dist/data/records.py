"""A record (a JSON object, a row of a table) to one text, and to what of it is learnt.

Plain text; a template over the record's fields; a prompt in front that is read but not learnt; a chat of which the
assistant's turns are learnt; a table's row of which one field is the regression's target.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, NamedTuple

from cqwen_dist.config import DataConfig, NumberPolicy, UserError
from cqwen_dist.config.errors import Said
from cqwen_dist.data.cells import as_number, as_text, is_empty
from cqwen_dist.data.chat import BadChat, Chat, Spans
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.turns import messages_of, tools_of
from cqwen_dist.delimited import has_decimal_comma

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


# A record and its place; or the place and why there is none; or a text that is ready.
Row = tuple[str, "Mapping[str, Any] | BadLine | Text"]
# Rows that can be had in any process: a function of a module with its arguments.
Block = Callable[[], Iterable[Row]]
Extract = Callable[[Mapping[str, Any], str], Text]
_OTHERS = "*"  # in a template: all fields that are named nowhere, a line each


def given(rows: list[Row]) -> list[Row]:
    """A block of rows that are there already."""
    return rows


def _named_fields(config: DataConfig) -> list[str]:
    """The fields that the config names, each once, and `_OTHERS`. Raises `UserError` for a bad template."""
    if config.messages_field is not None:
        return [config.messages_field]
    names = _template_fields("data.prompt_template", _unescaped(config.prompt_template))
    template = _unescaped(config.text_template)
    names += [config.text_field] if template is None else _template_fields("data.text_template", template)
    names += config.more_values
    names += [config.labels_field] if config.labels_field is not None else []
    return list(dict.fromkeys(names))


def needed_columns(config: DataConfig, columns: Sequence[str]) -> list[str]:
    """The columns of a table that become text; the others need not be read. Raises: BadLine where one is missing."""
    names = _named_fields(config)
    missing = next((name for name in names if name not in columns and name != _OTHERS), None)
    if missing is not None:
        raise BadLine("missing field", list(columns), f"a table with the column {missing!r}")
    optional = {config.tools_field} if config.messages_field is not None else set()
    return [name for name in columns if _OTHERS in names or name in names or name in optional]


def extractor(config: DataConfig, chat: Chat) -> Extract:
    """The function from a record and its place to its text; it raises `BadLine`."""
    template, prompt_template = _unescaped(config.text_template), _unescaped(config.prompt_template)
    cells = _Cells(frozenset(_named_fields(config)), config.empty_cell)
    limit = int(config.max_text_mib * 2**20)
    names = {str(ours): theirs for ours, theirs in config.message_keys.items()}
    fields = {name for name in (config.target_field, *config.number_types) if name is not None}
    located = sorted(fields, key=lambda name: (template or "").index(f"{{{name}}}"))

    def clean(text: str) -> str:
        return _MARKS.sub("", text) if config.calculator_marks == "strip" else text

    def compose(record: Mapping[str, Any]) -> tuple[str, Spans | None, dict[str, tuple[int, int]]]:
        if config.messages_field is not None:
            try:
                messages = messages_of(cells.field(record, config.messages_field), names, config.roles)
                return *chat(messages, tools_of(record.get(config.tools_field))), {}
            except BadChat as error:
                raise BadLine("no chat", error.found, error.allowed) from None
            except RecursionError:
                raise BadLine("no chat", Said("values nested too deep"), "a few levels") from None
        spans: dict[str, tuple[int, int]] = {}
        if template is None:
            text = clean(cells.text(record, config.text_field, None))
        else:
            text, spans = _located(template, located, record, clean, cells)
            if config.target_field is not None:
                _refuse_unread(text[slice(*spans[config.target_field])], config.target_field, config.numbers)
        if not text.strip():
            raise BadLine("empty text", text, "a text that is not empty")
        if prompt_template is None:
            return text, None, spans
        prompt = clean(cells.fill(prompt_template, record))
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
            tuple(cells.number(record, name) for name in config.more_values),
        )

    return extract


class _Cells:
    """A record's cells as text. named: fields that the config names; empty: as `data.empty_cell`."""

    def __init__(self, named: frozenset[str], empty: str | None) -> None:
        self.named, self.empty = named, empty

    def fill(self, template: str, record: Mapping[str, Any]) -> str:
        """The template with the record's cells."""
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
        values = {name: self.text(record, name, self.empty) for name in names if name != _OTHERS}
        if _OTHERS in names:
            others = [name for name in record if name not in self.named]
            values[_OTHERS] = "".join(f"{name}: {self.text(record, name, self.empty)}\n" for name in others)
        return template.format(**values)

    def text(self, record: Mapping[str, Any], name: str, empty: str | None) -> str:
        """A cell. empty: what stands for one that is empty or not there; None: nothing for "", the others are bad."""
        value = self.field(record, name) if empty is None else record.get(name)
        if is_empty(value) and empty is not None:
            return empty
        if is_empty(value) and value != "":
            raise BadLine("empty cell", value, f"something in the field {name!r} (or data.empty_cell)")
        found = as_text(value)
        if found is None:
            raise BadLine("wrong type", value, f"a string or a number in the field {name!r}")
        return found

    def number(self, record: Mapping[str, Any], name: str) -> float:
        """A cell that is a number by itself."""
        found = as_number(self.field(record, name))
        if found is None:
            raise BadLine("wrong type", record[name], f"a number in the field {name!r}")
        return found

    @staticmethod
    def field(record: Mapping[str, Any], name: str) -> Any:
        """What a record holds."""
        if name not in record:
            raise BadLine("missing field", sorted(record), f"a JSON object with the field {name!r}")
        return record[name]


def _located(
    template: str, names: list[str], record: Mapping[str, Any], clean: Callable[[str], str], cells: _Cells
) -> tuple[str, dict[str, tuple[int, int]]]:
    """The template's text, and where in it (as NFC) each of some fields is, which are named in their order there."""
    text, rest, spans = "", template, {}
    for name in names:
        head, rest = _around(rest, name)
        cell = cells.field(record, name)
        if is_empty(cell):
            raise BadLine("empty cell", cell, f"a number in the field {name!r}")
        before = unicodedata.normalize("NFC", text + clean(cells.fill(head, record)))
        text = unicodedata.normalize("NFC", before + cells.text(record, name, None))
        spans[name] = (len(before), len(text))
    return text + clean(cells.fill(rest, record)), spans


def _refuse_unread(cell: str, name: str, policy: NumberPolicy) -> None:
    """Raises: BadLine for a target that is not read as a number, or as another one than it is."""
    found, exact = [span.value for span in find_numbers(cell, policy)], as_number(cell)
    if has_decimal_comma(cell) and len(found) != 1:
        raise BadLine(
            "decimal comma", cell, f"a decimal point in the field {name!r} (in CSV: data.decimal_comma: true)"
        )
    if not found or (exact is not None and found != [exact]):
        raise BadLine("no number", cell, f"what is read as <NUM> in the field {name!r} (data.numbers, docs/numbers.md)")


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
