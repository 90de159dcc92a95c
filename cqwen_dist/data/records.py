"""Converts a record (a JSON object or table row) to a text with its learnt spans.

The text is a field, a template over fields, or a chat whose assistant turns are learnt. A prompt before the text is not
learnt. One field can be the regression target.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cqwen_dist.config.data import DataConfig, NumberPolicy, filled, template_fields
from cqwen_dist.config.errors import BadLine, Said, UserError
from cqwen_dist.data.cells import TableCells, as_number, as_text, is_empty, is_index, is_rounded
from cqwen_dist.data.chat import READ_SO, Chat, Spans, messages_of
from cqwen_dist.data.number_forms import Form, said
from cqwen_dist.data.numbers import find_numbers

# GSM8K's calculator marks. They need "=" and have no letters: "cout << a; cin >> b" must not match.
MARKS = re.compile(r"<<[^<>A-Za-z;\n]*=[^<>A-Za-z;\n]*>>")


class Text(NamedTuple):
    """A text with its place and learnt spans. Spans are characters [start, end), in order."""

    text: str
    where: str  # `file:line` or `bundled:name:number`
    learnt: Spans | None = None  # None: everything, end token included
    target: tuple[int, int] | None = None  # numbers inside are targets; None: by data.numeric_targets
    unused: tuple[str, ...] = ()  # notes on parts that are not learnt, one for each field, turn or thought


@dataclass
class ReadReport:
    """Counts of texts read and skipped."""

    read: int = 0  # texts
    skipped: dict[str, int] = field(default_factory=dict)  # kind of bad line -> count
    first: dict[str, str] = field(default_factory=dict)  # kind of bad line, or of part -> place of the first
    unused: dict[str, int] = field(default_factory=dict)  # kind of part that teaches nothing -> count
    columns: dict[str, dict[str, Any]] | None = None  # a table's columns (`data.columns`); None: unknown

    def add(self, other: "ReadReport") -> None:
        """Add a later report."""
        self.read += other.read
        self.first = {**other.first, **self.first}
        for counts, more in ((self.skipped, other.skipped), (self.unused, other.unused)):
            for kind, count in more.items():
                counts[kind] = counts.get(kind, 0) + count

    def lines(self) -> list[str]:
        """For people: the forms of numbers, each kind of bad line and of unused part, and the unread fields."""
        forms = {name: Form.of(column["form"]) for name, column in (self.columns or {}).items() if "form" in column}
        lines = [said(forms)] if forms else []
        lines += [f"skipped: {count:,} x {kind}, first at {self.first[kind]}" for kind, count in self.skipped.items()]
        fields, odd, rest = dict[str, int](), list[str](), list[str]()
        for kind, count in self.unused.items():
            if kind.startswith(_FIELD):
                fields[kind.removeprefix(_FIELD)] = count
            elif kind.startswith(_ODD):
                told = f"{count:,} cells are no number and stay text, first at {self.first[kind]}"
                odd.append(f"column {kind.removeprefix(_ODD)}: {told}")
            elif kind.startswith(READ_SO):
                rest.append(f"{READ_SO}{count:,} x {kind.removeprefix(READ_SO)}, first at {self.first[kind]}")
            else:
                rest.append(f"not used: {count:,} x {kind}")
        lines += odd + rest
        if fields:
            named = ", ".join(f"{name} ({count:,} records)" for name, count in [*fields.items()][:_NAMED])
            lines.append(f"not read: {named}" + (f" and {len(fields) - _NAMED:,} more" * (len(fields) > _NAMED)))
        return lines


# A place with a record, an error, or a finished text.
Row = tuple[str, "Mapping[str, Any] | BadLine | Text"]
Block = list[Row]
# A text, its learnt spans, the span of the target field, and notes on parts that are not learnt.
_Composed = tuple[str, "Spans | None", "tuple[int, int] | None", tuple[str, ...]]
_FIELD, _NAMED = "field ", 8  # the kind of an unread field, before its name; fields named in a report
_ODD = "no number in "  # the kind of a cell in a column of numbers that is none, before the column's name
MAX_TEXT = 16 * 2**20  # bytes of a line or record; one with more is a bad line
_OTHERS = "*"  # in a template: all named fields that the config does not mention, one line each


def named_fields(config: DataConfig) -> list[str]:
    """Fields that the config mentions, without repeats; may include `_OTHERS`."""
    if config.messages_field is not None:
        return [config.messages_field]
    names = template_fields(config.prompt_template)
    names += [config.text_field] if config.text_template is None else template_fields(config.text_template)
    return list(dict.fromkeys(names))


def needed_columns(config: DataConfig, columns: Sequence[str], where: str) -> list[str]:
    """Table columns that the config uses. Raises: BadLine if one is missing; UserError if two have the same name."""
    named = [name for name in columns if name]
    if columns and len({*named}) < max(len(named), 1):
        raise UserError("columns", columns, "a table with another name for every column", where)
    names = named_fields(config)
    missing = next((name for name in names if name not in columns and name != _OTHERS), None)
    if missing is not None:
        raise BadLine("missing field", list(columns), f"a table with the column {missing!r}")
    return [name for name in columns if name and (_OTHERS in names or name in names)]


class Extractor:
    """Converts a record at a place to a text. Raises `BadLine`; `UserError` for a broken chat template.

    forms: how columns write their numbers (`data.columns`). columns: of the table, for {*} with data.target_field.
    """

    def __init__(
        self, config: DataConfig, chat: Chat, forms: Mapping[str, Form] | None = None, columns: Iterable[str] = ()
    ) -> None:
        self.config, self.chat = config, chat
        self.cells = TableCells(forms or {}, config.target_field)
        self._rounded = set[str]()  # of the record in hand, if its target loses digits
        self._template, self._prompt = config.text_template, config.prompt_template
        self._named = frozenset(named_fields(config))
        self._columns = self._starred(columns) if config.target_field is not None else []
        self._known: dict[tuple[str, ...], list[str]] = {}  # the fields of a record -> the unread ones

    def __call__(self, record: Mapping[str, Any], where: str) -> Text:
        of_chat = self.config.messages_field is not None
        self.cells.odd.clear()
        self._rounded.clear()
        text, learnt, target, unused = self._chat(record) if of_chat else self._plain(record)
        try:
            size = len(text) if text.isascii() else len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise BadLine("not Unicode text", text[error.start : error.end], "no lone surrogates") from None
        if size > MAX_TEXT:
            raise too_long(size)
        odd = [f"{_ODD}{name}" for name in sorted(self.cells.odd)]
        return Text(text, where, learnt, target, (*unused, *self._rounded, *odd, *self._unread(tuple(record))))

    def _unread(self, fields: tuple[str, ...]) -> list[str]:
        """Kinds of fields in the record that the config does not use."""
        if fields not in self._known:
            read = self._named.union((self._columns or self._starred(fields)) if _OTHERS in self._named else ())
            odd = [name for name in fields if name not in read or not name]
            self._known[fields] = [f"{_FIELD}{name or 'without a name'}" for name in odd]
        return self._known[fields]

    def _starred(self, fields: Iterable[str]) -> list[str]:
        return [name for name in fields if name and name not in self._named and not is_index(name)]

    @property
    def inputs(self) -> list[str]:
        """The fields before the target."""
        names = [name for part in self._before for name in template_fields(part)]
        return [name for name in names if name != _OTHERS] + (self._columns if _OTHERS in names else [])

    @property
    def _before(self) -> tuple[str, str]:
        return self._prompt or "", (self._template or "").partition(f"{{{self.config.target_field}}}")[0]

    def before(self, record: Mapping[str, Any]) -> tuple[str, ...]:
        """The text before the target, in the parts in which training encodes it. Raises `BadLine`."""
        return tuple(filter(None, (self._fill(part, record) for part in self._before)))

    def _chat(self, record: Mapping[str, Any]) -> _Composed:
        try:
            text, learnt, unused = self.chat(messages_of(_field(record, str(self.config.messages_field))))
            return text, learnt, None, unused
        except RecursionError:
            raise BadLine("no chat", Said("values nested too deep"), "a few levels") from None

    def _plain(self, record: Mapping[str, Any]) -> _Composed:
        text, target = self._text(record)
        if not text.strip():
            raise BadLine("empty text", text, "a text that is not empty")
        if self._prompt is None:
            return text, None, target, ()
        prompt = self._fill(self._prompt, record)
        start, end = len(prompt), len(prompt) + len(text)
        moved = None if target is None else (start + target[0], start + target[1])
        return prompt + text, ((start, end),), moved, ()

    def _text(self, record: Mapping[str, Any]) -> tuple[str, tuple[int, int] | None]:
        """The text without a prompt, and the span of the target field in the NFC text."""
        config, name = self.config, self.config.target_field
        if self._template is None:
            return MARKS.sub("", self._cell(record, config.text_field, None)), None
        if name is None:
            return self._fill(self._template, record), None
        head, _, rest = self._template.partition(f"{{{name}}}")
        cell = _field(record, name)
        # "-" is empty in a column of numbers
        if is_empty(cell) or (name in self.cells.forms and not self.cells.text(name, cell)):
            raise BadLine("empty cell", cell, f"a number in the field {name!r}")
        # Reading normalises to NFC later, which can shorten a text. Normalise here, so that the span stays valid.
        before = unicodedata.normalize("NFC", self._fill(head, record))
        text = unicodedata.normalize("NFC", before + self._cell(record, name, None))
        span = len(before), len(text)
        text += self._fill(rest, record)
        _refuse_unread(text, span, name, config.policy)
        return text, span

    def _fill(self, template: str, record: Mapping[str, Any]) -> str:
        empty = self.config.empty_cell
        names = template_fields(template)
        values = {name: self._cell(record, name, empty) for name in names if name != _OTHERS}
        if _OTHERS in names:
            listed = self._columns or self._starred(record)
            values[_OTHERS] = "".join(f"{name}: {self._cell(record, name, empty)}\n" for name in listed)
        return MARKS.sub("", filled(template, values.__getitem__))

    def _cell(self, record: Mapping[str, Any], name: str, empty: str | None) -> str:
        """Cell as text. empty: replaces an empty or missing cell; None: only "" may be empty."""
        value = _field(record, name) if empty is None else record.get(name)
        if empty is not None and is_empty(value):
            return empty
        if is_empty(value) and value != "":
            raise BadLine("empty cell", value, f"a value in the field {name!r} (or data.empty_cell or predict's empty)")
        if self.config.target_field is not None:
            return self._cell_of_table(name, value, empty)
        text = as_text(value)
        if text is None:
            raise BadLine("wrong type", value, f"a string or a number in the field {name!r}")
        form = self.cells.forms.get(name)
        return text if form is None else form.read(text) or text

    def _cell_of_table(self, name: str, value: Any, empty: str | None) -> str:
        is_target, is_number = name == self.config.target_field, name in self.cells.forms
        found = self.cells.text(name, value)
        if not found:
            found = str(value).strip() if empty is None else empty
            self.cells.odd.update({name} if is_number and empty is None else ())
        if is_target and is_rounded(found):
            self._rounded.add(f"digits of {name} that float64 does not hold")
        return as_read(found, self.config.policy) if is_target and is_number else found


def as_read(numeral: str, policy: NumberPolicy) -> str:
    """The numeral as the policy reads it: "13812345678.0", as 13812345678 looks like a telephone number."""
    value = as_number(numeral)
    if value is None or [span.value for span in find_numbers(numeral, policy)] == [value]:
        return numeral
    return repr(value)


def _field(record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        raise BadLine("missing field", sorted(record), f"a JSON object with the field {name!r}")
    return record[name]


def _refuse_unread(text: str, place: tuple[int, int], name: str, policy: NumberPolicy) -> None:
    """Raises: BadLine if the target, by itself or in the text, does not read as its number."""
    start, end = place
    cell = text[start:end]
    # Read the cell twice, by itself and in the text: neighbouring characters can change what is a number.
    found, exact = [span.value for span in find_numbers(cell, policy)], as_number(cell)
    there = [span.value for span in find_numbers(text, policy) if start <= span.start and span.end <= end]
    if not found or found != there or math.inf in map(abs, found) or (exact is not None and found != [exact]):
        around = text[max(start - 20, 0) : end + 20]
        allowed = f"what is read as <NUM> in the field {name!r}, here in {around!r} (data.numbers, docs/numbers.md)"
        raise BadLine("no number", cell, allowed)


def too_long(size: int) -> BadLine:
    """Error for a line or text above the size limit."""
    return BadLine("text too long", Said(f"{size / 2**20:,.1f} MiB or more"), f"at most {MAX_TEXT / 2**20:g} MiB")
