"""Record cells (empty, text or number), and the error for an unusable record."""

from __future__ import annotations

import math
from datetime import date
from decimal import Decimal

import numpy as np

from cqwen_dist.delimited import MISSING


class BadLine(Exception):
    """An unusable line or record. kind: counted in the report; found and allowed: as in `UserError`."""

    def __init__(self, kind: str, found: object, allowed: str) -> None:
        super().__init__(kind, found, allowed)
        self.kind, self.found, self.allowed = kind, found, allowed


class Literal(str):
    """A JSON number with its original digits, so a template loses none."""


def is_empty(value: object) -> bool:
    """Whether a cell is null, "" or NaN."""
    return value is None or value == "" or value != value


def is_missing(value: object) -> bool:
    """Whether a table cell is empty or contains a word for "missing" (`MISSING`)."""
    return is_empty(value) or (isinstance(value, str) and value.strip() in MISSING)


def any_text(value: object) -> str:
    """Any cell as text; an empty cell becomes ""."""
    return "" if is_empty(value) else as_text(value) or str(value)


def as_text(value: object) -> str | None:
    """Cell as text; None unless it is text, a number or a date.

    Floats use the shortest form that parses to the same float64. Numbers from text files keep their digits.
    """
    if isinstance(value, bool) or (isinstance(value, (float, Decimal)) and not math.isfinite(value)):
        return None
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, Decimal):
        return format(value, "f")
    return str(value) if isinstance(value, (str, int, date)) else None


def as_number(value: object) -> float | None:
    """Cell as a finite number, or None."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def shortened(value: object) -> object:
    """Convert a float32 (stored as float64) by its shortest decimal form: 0.1, not 0.10000000149011612."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
