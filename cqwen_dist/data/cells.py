"""Record cells: one text for one value, whatever file brought it; and the error for an unusable record.

A date is 2024-01-07 from CSV, Parquet and pandas, true is `true`, 5.0 is 5. Nested values are JSON.
"""

import ast
import json
import math
import re
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from cqwen_dist.config.errors import BadLine
from cqwen_dist.data.number_forms import EMPTY_MARKS, Form, numeral

# Missing values as written by pandas, R, spreadsheets and databases; also Excel's errors
MISSING = frozenset({"", "NaN", "nan", "NA", "N/A", "n/a", "#N/A", "<NA>", "None", "NULL", "null", "NaT"}) | frozenset(
    {"#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!", "#NULL!", "#CALC!", "#SPILL!"}
)
_FRACTIONAL = (float, Decimal, np.floating)
_INDEX = re.compile(r"__index_level_\d+__|Unnamed: 0")  # pandas' name for an index without one
_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(?::(\d\d)(?:\.(\d+))?)?(?: ?(Z|UTC|[+-]\d\d:?\d\d))?", re.ASCII
)
_TRUTH = {"true", "True", "TRUE", "false", "False", "FALSE"}
_MOST_NESTED = 1 << 16  # characters of a cell that is tried as nested


class Literal(str):
    """A JSON number with its original digits, so a template loses none."""


_JSON = json.JSONDecoder(parse_int=Literal, parse_float=Literal)


def is_index(column: str) -> bool:
    """Whether a column is a table's row number, which pandas saved."""
    return _INDEX.fullmatch(column) is not None


def is_empty(value: object) -> bool:
    """Whether a cell is null, "", NaN, or pandas' NA or NaT."""
    if isinstance(value, str):
        return value == ""
    is_nan = isinstance(value, _FRACTIONAL) and math.isnan(value)
    return value is None or type(value).__name__ in ("NAType", "NaTType") or is_nan


def is_missing(value: object) -> bool:
    """Whether a table cell is empty, an infinity, or contains a word for "missing" (`MISSING`)."""
    infinite = isinstance(value, _FRACTIONAL) and math.isinf(value)
    return infinite or is_empty(value) or (isinstance(value, str) and value.strip() in MISSING)


def is_number(value: object) -> bool:
    """Whether a cell is a number in its file, not a text."""
    return isinstance(value, (Literal, int, float, Decimal, np.integer, np.floating)) and not isinstance(value, bool)


def as_text(value: object) -> str | None:
    """Cell as text; None unless it is text, a number, true or false, a date, or a time.

    Floats use the shortest form that parses to the same float64. Numbers from text files keep their digits. A timestamp
    at midnight is its date.
    """
    if isinstance(value, np.generic):
        value = float(str(value)) if isinstance(value, np.floating) else value.item()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (float, Decimal)):
        if not math.isfinite(value):
            return None
        return format(value, "f") if isinstance(value, Decimal) else repr(float(value)).removesuffix(".0")
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    if isinstance(value, date):  # datetime is one too
        return _plain_time(str(value))
    if isinstance(value, timedelta):
        return f"{value.days} days {timedelta(seconds=value.seconds, microseconds=value.microseconds)!s:0>8}"
    kind = type(value)
    of_pandas = kind.__module__.partition(".")[0] == "pandas" and kind.__name__ in ("Period", "Interval")
    return str(value) if isinstance(value, (str, int, time)) or of_pandas else None


def cell_text(value: object) -> str | None:
    """A table's cell: `as_text`, and one text for one value even if the file has a text. None: as there."""
    if isinstance(value, (Mapping, list, tuple, np.ndarray)):
        return _json(value)
    text = as_text(value)
    if text is None:
        return None
    text = text.strip()
    if is_number(value):
        return numeral(text)
    if text in _TRUTH:
        return text.lower()
    if text[:1] in ("[", "{") and len(text) <= _MOST_NESTED:
        return _nested(text)
    return _plain_time(text)


def _plain_time(text: str) -> str:
    """2024-01-07T00:00:00.000 as 2024-01-07, with any other time as 2024-01-07 10:20:00; other texts as given."""
    found = _TIMESTAMP.fullmatch(text)
    if found is None:
        return text
    day, minutes, seconds, fraction, zone = found.groups()
    fraction = (fraction or "").rstrip("0")
    clock = f"{minutes}:{seconds or '00'}{'.' * bool(fraction)}{fraction}"
    if zone is None:
        return day if clock == "00:00:00" else f"{day} {clock}"
    zone = "+00:00" if zone in ("Z", "UTC") else f"{zone[:3]}:{zone[-2:]}"
    return f"{day} {clock}{zone}"


def _nested(text: str) -> str:
    """A list or object in a cell of CSV, as JSON or as Python writes it, in the form of `_json`; else the text."""
    for parse in (_JSON.decode, ast.literal_eval):
        try:
            return _json(parse(text))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return text


def _json(value: object) -> str:
    """A nested value as JSON: names in alphabetical order, nulls in objects left out, since Arrow adds both."""
    if isinstance(value, Mapping):
        held = sorted((str(name), inner) for name, inner in value.items() if not is_empty(inner) or inner == "")
        return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {_json(inner)}" for name, inner in held) + "}"
    if isinstance(value, (list, tuple, np.ndarray)):
        return f"[{', '.join(map(_json, value))}]"
    if is_empty(value) and value != "":
        return "null"
    text = as_text(value)
    if text is None:
        raise TypeError(f"a {type(value).__name__}")
    if is_number(value):
        return numeral(text)
    return text if isinstance(value, (bool, np.bool_)) else json.dumps(_plain_time(text), ensure_ascii=False)


def as_number(value: object) -> float | None:
    """Cell as a finite number, or None."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def number_in(text: str) -> float | None:
    """The number of a cell's text (`TableCells.text`), as the prompt has it, or None.

    000105, 1_05 and ١٠٥ are numbers for Python, but names in a prompt.
    """
    number = as_number(text)
    return None if number is None or Form().read(text) is None else number


def is_rounded(text: str) -> bool:
    """Whether a whole numeral has digits that float64 does not hold."""
    number = as_number(text)
    return number is not None and text.removeprefix("-").isdecimal() and int(text) != number


def shortened(value: object, of: Any = np.float32) -> object:
    """A float32 or float16 (of), held as float64, in its shortest decimal form: 0.1, not 0.10000000149011612."""
    return float(str(of(value))) if isinstance(value, float) else value


class TableCells:
    """Reads the cells of a table: numbers by their column's form, other cells by `cell_text`.

    forms: of the columns with numbers; target: a column that may write 7 as 007.
    """

    def __init__(self, forms: Mapping[str, Form], target: str | None = None) -> None:
        self.forms, self.target = forms, target
        self.odd = set[str]()  # columns of numbers with a cell that is none; whoever reads them empties it

    def number(self, column: str, text: str) -> float | None:
        """`number_in` of a cell's text. A target may also have digits that are learnt rounded."""
        return as_number(text) if column == self.target else number_in(text)

    def text(self, column: str, value: object) -> str:
        """The cell's text, "" if it is empty. Raises: BadLine for a number in a different form, or no text."""
        if is_missing(value):
            return ""
        form = self.forms.get(column)
        # A number that is no text in its file has no unit, so it must not stand where the unit scales
        if form is None or not (form.scales if is_number(value) else isinstance(value, str)):
            text = cell_text(value)
            if text is None:
                raise BadLine("wrong type", value, f"text, a number, true or false, a date in the field {column!r}")
            return text
        cell = str(value).strip()
        if cell in EMPTY_MARKS:
            return ""
        found = form.read(cell, names=column == self.target)
        if found is None and column == self.target and form == Form() and (number := as_number(cell)) is not None:
            return numeral(repr(number))  # 1_000, as Python reads it
        if found is None and (column == self.target or form.other_reads(cell)):
            allowed = f"numbers such as {form} in the column {column!r} (data.number_columns{form.option_for(cell)})"
            raise BadLine("another form of number", cell, allowed)
        if found is None:
            self.odd.add(column)
            return cell
        return found
