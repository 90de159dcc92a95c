"""Errors that the user can fix."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


class Said(str):
    """A `found` that is shown without quotes."""


class UserError(Exception):
    """Wrong user input: one line with the key, the value found and the values allowed (exit 2).

    `found` is shown as repr, except text that starts with "no " ("no such file") or is `Said`. With allowed "", `found`
    is the complete message.
    """

    def __init__(self, key: str, found: object, allowed: str, where: str = "") -> None:
        super().__init__(key, found, allowed, where)
        self.key, self.found, self.allowed, self.where = key, found, allowed, where

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        said = f"found {_short(self.found)}, allowed: {self.allowed}" if self.allowed else str(self.found)
        return printable(" ".join(f"{place}{self.key}: {said}".split()))


class DiskError(UserError):
    """A run cannot continue on this disk. away: its file system is unreachable but may come back (exit 74)."""

    def __init__(self, key: str, found: object, allowed: str, where: str = "", away: bool = False) -> None:
        super().__init__(key, found, allowed, where)
        self.away = away


class BadLine(Exception):
    """An unusable line or record. kind: counted in the report; found and allowed: as in `UserError`."""

    def __init__(self, kind: str, found: object, allowed: str) -> None:
        super().__init__(kind, found, allowed)
        self.kind, self.found, self.allowed = kind, found, allowed


def reason_of(error: object, most: int = 160) -> str:
    """An error's message in one line, at most `most` characters; its type if the message is empty."""
    return " ".join(str(error).split())[:most] or type(error).__name__


@contextmanager
def writing(key: str, path: object, allowed: str = "a file that can be written") -> Iterator[None]:
    """Converts an `OSError` while writing `path` into a `UserError` for `key`."""
    try:
        yield
    except OSError as error:
        raise UserError(key, str(path), f"{allowed} ({error.strerror or error})") from None


# Control characters but tab and line feed, line separators, marks that turn a text's direction, lone surrogates
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def printable(text: str) -> str:
    """Text for a terminal: characters that could move the cursor, recolour, hide or reverse other text is shown as an
    escape."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)  # a form that JSON has too


def _short(value: object) -> str:
    if isinstance(value, Said) or (isinstance(value, str) and value.startswith("no ")):
        text = str(value)
    else:
        try:
            text = repr(value)
        except (RecursionError, ValueError):  # nested too deep, or an int with too many digits to print
            text = f"a {type(value).__name__} too large to show"
    text = " ".join(text.split())
    return text if len(text) <= 120 else text[:117] + "..."


def refuse_ranks(world: int, vocab_group_size: int, sequence_group_size: int = 1) -> None:
    """Raises `UserError` if the size of a group of ranks does not divide `world` ranks."""
    for key, size in (("vocab_group_size", vocab_group_size), ("sequence_group_size", sequence_group_size)):
        if world % size:
            divisors = ", ".join(str(d) for d in range(1, min(world, 1024) + 1) if world % d == 0)
            ranks = f"the {world} rank{'s' * (world > 1)}"
            raise UserError(f"parallel.{key}", size, f"a divisor of {ranks}: {divisors}")
