"""Cells of a record: empty, text, or a number; and the error for a record that cannot be used."""

from __future__ import annotations

import math
from datetime import date
from decimal import Decimal

import numpy as np

from cqwen_dist.delimited import MISSING


class BadLine(Exception):
    """A line or record that cannot be used: kind (counted), what was found, what is allowed."""

    def __init__(self, kind: str, found: object, allowed: str) -> None:
        super().__init__(kind, found, allowed)
        self.kind, self.found, self.allowed = kind, found, allowed


class Literal(str):
    """A JSON number as it stands in the file: no digit is lost on the way into a template."""


def is_empty(value: object) -> bool:
    """Whether a cell holds nothing: null, no characters, or NaN."""
    return value is None or value == "" or value != value


def is_missing(value: object) -> bool:
    """Whether a table's cell holds nothing, or says so in a word (`MISSING`)."""
    return is_empty(value) or (isinstance(value, str) and value.strip() in MISSING)


def any_text(value: object) -> str:
    """A cell of any type as text; nothing where it is empty."""
    return "" if is_empty(value) else as_text(value) or str(value)


def as_text(value: object) -> str | None:
    """The cell as text; None where it is neither text, number nor date.

    A float in the shortest form that reads back as the same float64; a number of a text file as it stands there.
    """
    if isinstance(value, bool) or (isinstance(value, (float, Decimal)) and not math.isfinite(value)):
        return None
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, Decimal):
        return format(value, "f")
    return str(value) if isinstance(value, (str, int, date)) else None


def as_number(value: object) -> float | None:
    """The cell as a finite number; None where it is none."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def shortened(value: object) -> object:
    """A float32, held as a float64, as the float64 of its shortest decimal form: 0.1, not 0.10000000149011612."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
