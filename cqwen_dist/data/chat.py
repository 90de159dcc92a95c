"""Chats to text by a tokenizer's chat template, and which characters of it the assistant wrote.

Few templates say which part is the assistant's (`{% generation %}`), Qwen's do not. So the template is filled twice:
as it is, and with a pair of characters around each of the assistant's messages that no chat holds. What stands between
them, up to the end-of-turn token, is learnt; the two texts must be equal otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cqwen_dist.config import UserError

# Qwen's own form, for a tokenizer that has no template.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters

# ShareGPT's names of the roles.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}

Spans = tuple[tuple[int, int], ...]


class BadChat(Exception):
    """A chat that cannot be used."""

    def __init__(self, found: object, allowed: str) -> None:
        super().__init__(allowed)
        self.found, self.allowed = found, allowed


class Chat:
    """A chat template, filled. Args: tokenizer: of transformers; None: Qwen's form."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.template: str = CHATML
        self._names: dict[str, Any] = {}
        self._ends: tuple[str, ...] = ("<|im_end|>",)
        if tokenizer is not None:
            self.template = tokenizer.get_chat_template() if tokenizer.chat_template else CHATML
            self._names = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
            special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
            self._ends = tuple(sorted(special | set(self._ends), key=len, reverse=True))

    def __call__(self, messages: Any) -> tuple[str, Spans]:
        """The text of a chat and the characters that are learnt. Raises: BadChat, UserError for a broken template."""
        messages = _of_sharegpt(messages)
        _check_messages(messages)
        by_assistant = [message["role"] == "assistant" for message in messages]
        marked = self._fill([_marked(m) if own else dict(m) for m, own in zip(messages, by_assistant, strict=True)])
        plain = self._fill([dict(m) for m in messages])
        # Between the marks, every second piece is the assistant's.
        pieces, spans, position = marked.replace(_CLOSE, _OPEN).split(_OPEN), [], 0
        for i, piece in enumerate(pieces):
            if i % 2:
                spans.append((position, position + len(piece)))
            position += len(piece)
        if "".join(pieces) != plain or len(spans) != sum(by_assistant):
            allowed = "a template that writes the assistant's messages as they are"
            raise UserError("data.messages_field", "a chat template that changes messages", allowed)
        return plain, tuple((start, self._end_of_turn(plain, end)) for start, end in spans)

    def _end_of_turn(self, text: str, end: int) -> int:
        """Behind the special token that directly follows, white space between them; else where the message ends."""
        at = end + len(text[end:]) - len(text[end:].lstrip())
        return next((at + len(token) for token in self._ends if text.startswith(token, at)), end)

    def _fill(self, messages: list[dict[str, Any]]) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            filled = render_jinja_template([messages], chat_template=self.template, **self._names)
        except Exception as error:  # whatever the template's own code raises
            raise BadChat(_one_line(error), "a chat that the chat template takes") from None
        return str(filled[0][0])


def _of_sharegpt(messages: Any) -> Any:
    """[{from, value}, ...] as [{role, content}, ...]; anything else as it is."""
    if not isinstance(messages, (list, tuple)) or not all(
        isinstance(message, Mapping) and {"from", "value"} <= message.keys() for message in messages
    ):
        return messages
    return [{"role": _ROLES.get(m["from"], m["from"]), "content": m["value"]} for m in messages]


def _check_messages(messages: Any) -> None:
    """Raises: BadChat unless these are messages, the assistant's among them."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise BadChat(messages, "a list of messages, [{role, content}, ...]")
    for message in messages:
        if not isinstance(message, Mapping) or not all(type(message.get(k)) is str for k in ("role", "content")):
            raise BadChat(message, "messages with a role and a content, both text")
        if _OPEN in message["content"] or _CLOSE in message["content"]:
            raise BadChat(message["content"], "no noncharacters U+FDD0, U+FDD1")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadChat([message["role"] for message in messages], "a turn of the assistant")


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with marks inside its outer white space, which templates trim."""
    content = message["content"]
    core = content.strip()
    start = len(content) - len(content.lstrip())
    return {**message, "content": f"{content[:start]}{_OPEN}{core}{_CLOSE}{content[start + len(core) :]}"}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:100] or type(error).__name__
