"""Normalises chat formats: messages {role, content}."""

import json
from collections.abc import Mapping
from typing import Any

from cqwen_dist.config.errors import BadLine
from cqwen_dist.data.cells import Literal, as_text

ROLES = ("system", "developer", "user", "assistant")
_SHAREGPT = {**dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"), "human": "user"}


def messages_of(found: Any) -> list[dict[str, Any]]:
    """A chat's messages in the format of chat templates. Raises `BadLine`.

    ShareGPT's keys from and value are known too. A null value counts as missing, because tables have every key in every
    message.
    """
    if not isinstance(found, (list, tuple)) or not found:
        raise BadLine("no chat", found, "a list of messages, [{role, content}, ...]")
    return [_message(message) for message in found]


def _message(found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise BadLine("no chat", found, "messages with a role and a content, both text")
    names = ("role" if "role" in found else "from", "content" if "content" in found else "value")
    role, content = map(found.get, names)
    role = _SHAREGPT.get(role, role) if isinstance(role, str) else ""
    if role not in ROLES or found.get("tool_calls"):
        allowed = f"messages with a role, {', '.join(ROLES)}, and a content, without tool calls"
        raise BadLine("no chat", found.get("tool_calls") or found.get(names[0]), allowed)
    rest = {key: _plain(value) for key, value in found.items() if value is not None and key not in names}
    return {**rest, "role": role, "content": _content(content)}


def _content(found: Any) -> str:
    """Text, or text parts joined to one text."""
    if isinstance(found, (list, tuple)) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in found):
        found = "".join(str(part.get("text")) for part in found)
    text = as_text(found)
    if text is None:
        raise BadLine("no chat", found, "messages with a role and a content, both text")
    return text


def _plain(value: Any) -> Any:
    """Convert `Literal` numbers to numbers, and drop keys without a value."""
    if isinstance(value, Literal):
        try:
            return json.loads(value)
        except ValueError:  # too many digits for Python's int
            return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
