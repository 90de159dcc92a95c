"""The one error that is the user's to mend."""

from __future__ import annotations


class UserError(Exception):
    """The user's input is wrong: one line that names the key, what was found and what is allowed (exit 2)."""

    def __init__(self, key: str, found: object, allowed: str, where: str = "") -> None:
        place = f"{where}: " if where else ""
        super().__init__(f"{place}{key}: found {_short(found)}, allowed: {allowed}")
        self.key, self.found, self.allowed, self.where = key, found, allowed, where


def _short(value: object, limit: int = 120) -> str:
    text = value if isinstance(value, str) and value.startswith("no ") else repr(value)
    text = " ".join(str(text).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
