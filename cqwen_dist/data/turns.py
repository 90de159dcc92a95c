"""Normalises chat formats: messages {role, content, tool_calls}, tools {type, function}."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from cqwen_dist.config.errors import BadLine
from cqwen_dist.data.cells import Literal, as_text

ROLES = ("system", "developer", "user", "assistant", "tool")
_CALL = "function_call"  # ShareGPT's role for an assistant message that is a call as JSON
_SHAREGPT = {
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "tool_response", "function_response", "function"), "tool"),
    "human": "user",
    "tool_call": _CALL,
}


def messages_of(found: Any) -> list[dict[str, Any]]:
    """A chat's messages in the format of chat templates. Raises `BadLine`.

    ShareGPT's keys from and value are known too. A null value counts as missing, because tables have every key in every
    message.
    """
    if not isinstance(found, (list, tuple)) or not found:
        raise BadLine("no chat", found, "a list of messages, [{role, content}, ...]")
    return [_message(message) for message in found]


def tools_of(found: Any) -> list[dict[str, Any]] | None:
    """Tools of a record, [{type, function: {name, ...}}, ...] or the same as JSON text; None if there are none."""
    tools = _nested(found, "tools as JSON")
    if tools is None or tools == [] or tools == "":
        return None
    if not isinstance(tools, list):
        raise BadLine("no chat", tools, 'a list of tools, [{"type": "function", "function": {"name": ...}}, ...]')
    return [_function(tool, "tools") for tool in tools]


def nulls_in(messages: Any, tools: Any) -> Iterator[str]:
    """Say that nulls are left out: in a table they are other rows' keys, in JSON perhaps the author's."""
    calls = [message.get("tool_calls") for message in messages if isinstance(message, Mapping)]
    for what, found in (("tool call", calls), ("tool", tools)):
        if _has_null(found):
            yield f"null in a {what} (kept where the {what}s, or their arguments, are JSON text)"


def _has_null(value: Any) -> bool:
    """Whether an object in this value, at any depth, has a null."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any((one is None and isinstance(value, Mapping)) or _has_null(one) for one in inner)


def _message(found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise BadLine("no chat", found, "messages with a role and a content, both text")
    names = ("role" if "role" in found else "from", "content" if "content" in found else "value", "tool_calls")
    role, content, calls = map(found.get, names)
    role = _role(role)
    if role == _CALL:
        role, content, calls = "assistant", None, content
    rest = {key: _plain(value) for key, value in found.items() if value is not None and key not in names}
    calls = _nested(calls, "tool_calls as JSON")
    if not calls:
        return {**rest, "role": role, "content": _content(content)}
    calls = [calls] if isinstance(calls, dict) else calls
    if role != "assistant" or not isinstance(calls, list):
        raise BadLine("no chat", calls, "a list of tool_calls, of the assistant")
    functions = [_function(call, "tool_calls") for call in calls]
    return {**rest, "role": role, "content": _content(content or ""), "tool_calls": functions}


def _role(found: Any) -> str:
    role = _SHAREGPT.get(found, found) if isinstance(found, str) else ""
    if role not in (*ROLES, _CALL):
        raise BadLine("no chat", found, f"messages with a role, {', '.join(ROLES)}, and a content")
    return role


def _content(found: Any) -> str:
    """Text, or text parts joined to one text."""
    if isinstance(found, (list, tuple)) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in found):
        found = "".join(str(part.get("text")) for part in found)
    text = as_text(found)
    if text is None:
        raise BadLine("no chat", found, "messages with a role and a content, both text")
    return text


def _function(found: Any, what: str) -> dict[str, Any]:
    """Wrap a function as {"type": "function", "function": {...}} unless it is wrapped; arguments become a mapping."""
    inner = found.get("function", found) if isinstance(found, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise BadLine("no chat", found, f'{what} with a name, such as {{"function": {{"name": "add", ...}}}}')
    if isinstance(inner.get("arguments"), str):
        inner = {**inner, "arguments": _from_json(inner["arguments"], "arguments as JSON")}
    outer = {"type": "function"} if inner is found else {"type": "function", **found}
    return {**outer, "function": inner}


def _from_json(found: Any, what: str) -> Any:
    if not isinstance(found, str) or not found.strip():
        return found
    try:
        return json.loads(found)
    except (ValueError, RecursionError) as error:
        raise BadLine("no chat", found, f"{what} ({error})") from None


def _nested(found: Any, what: str) -> Any:
    """JSON text as it is, other values without nulls."""
    return _from_json(found, what) if isinstance(found, str) else _plain(found)


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
