"""Chats to text by a tokenizer's chat template, and which characters of it the assistant wrote.

Few templates mark the assistant's part (`{% generation %}`), and Qwen's do not. So the template is filled twice: as it
is, and with two characters that no chat holds around each of the assistant's messages. Learnt is the text from where
generation would begin, or the message does, to the end-of-turn token. Without these characters the two texts must be
equal.

The template writes tool calls in its own form. There the characters go around the last call's name, and the text from
where generation would begin to the end of the turn is learnt.

Templates that write today's date get one fixed date: the texts of a run must be the same on each day.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from cqwen_dist.config import UserError
from cqwen_dist.config.errors import Said, reason_of
from cqwen_dist.data.cells import BadLine

# Qwen's own form, for a tokenizer that has no template.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The date that Llama 3's template has where it is not told one
_DATE = {"%d": "26", "%b": "Jul", "%B": "July", "%m": "07", "%Y": "2024"}
_FIXED_DATE = (
    "{% macro strftime_now(form) %}{{ form"
    + "".join(f"|replace('{part}', '{value}')" for part, value in _DATE.items())
    + " }}{% endmacro %}{{ '' }}"  # without the last a line end that opens the template would be trimmed
)
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters

Spans = tuple[tuple[int, int], ...]


class Chat:
    """A chat template, filled. Args: tokenizer: of transformers; None: Qwen's form."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.template = self.tool_template = CHATML
        self._names: dict[str, Any] = {}
        self._ends: tuple[str, ...] = ("<|im_end|>",)
        if tokenizer is not None:
            if tokenizer.chat_template:  # one, or several by name
                self.template = tokenizer.get_chat_template()
                self.tool_template = tokenizer.get_chat_template(tools=[])
            self._names = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
            special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
            self._ends = tuple(sorted(special | set(self._ends), key=len, reverse=True))

    def __call__(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> tuple[str, Spans]:
        """The text of a chat and the characters that are learnt.

        Args: messages, tools: as `cqwen_dist.data.turns` makes them. Raises: BadLine; UserError for a template that is
        broken or writes no tool calls.
        """
        own = [i for i, message in enumerate(messages) if _is_learnt(message)]
        if not own:
            raise BadLine(
                "no chat", [message["role"] for message in messages], "a turn of the assistant, not of weight 0"
            )
        plain = self._fill(messages, tools)
        if _OPEN in plain or _CLOSE in plain:
            raise BadLine("no chat", plain, "no noncharacters U+FDD0, U+FDD1")
        marked = self._fill([_marked(message) for message in messages], tools)
        pieces = marked.replace(_CLOSE, _OPEN).split(_OPEN)
        if "".join(pieces) != plain or len(pieces) != 2 * len(own) + 1:
            raise _changed(messages)
        if not all(tool["function"]["name"] in plain for tool in tools or ()):
            raise _unwritten("tools")
        ends = list(accumulate(map(len, pieces)))
        spans = zip(ends[:-1:2], ends[1::2], strict=True)  # between the marks, every second piece is the assistant's
        return plain, tuple(
            self._turn_of_calls(plain, messages[:i], tools, end)
            if "tool_calls" in messages[i]
            else (self._begin(plain, start), self._end_of_turn(plain, end))
            for i, (start, end) in zip(own, spans, strict=True)
        )

    def question(self, text: str) -> str:
        """The prompt of a chat whose only message is this one of the user's. Raises `UserError`."""
        try:
            return self._fill([{"role": "user", "content": text}], add_generation_prompt=True)
        except BadLine as bad:
            raise UserError("--chat", bad.found, bad.allowed) from None

    @cached_property
    def turn_end(self) -> str:
        """The token that ends the assistant's turns; a character that no text holds where there is none, and where the
        template takes no chat without a system message, which alone would show it."""
        try:
            return self._turn_end(None)
        except BadLine:
            return "\0"

    def _begin(self, text: str, start: int) -> int:
        """Where the assistant's turn begins whose message begins at `start`: Qwen3's template may write an empty
        thought, or the message's `reasoning_content`, between."""
        at = text.rfind(self._opening, 0, start)
        begin = at + len(self._opening)
        return start if at < 0 or (begin < start and self.turn_end in text[begin:start]) else begin

    @cached_property
    def _opening(self) -> str:
        """What the template writes in front of an answer; nothing where it takes no chat of one question."""
        asked = [{"role": "user", "content": "a"}]
        try:
            return self._fill(asked, add_generation_prompt=True).removeprefix(self._fill(asked))
        except BadLine:
            return ""

    def _turn_of_calls(self, text: str, before: Sequence[dict[str, Any]], tools: Any, at: int) -> tuple[int, int]:
        """The span of a turn with tool calls. at: where the name of its last call ends."""
        prompt = self._fill(before, tools, add_generation_prompt=True)
        turn_end = self._turn_end(tools)
        last = before[-1]["content"].strip() if before else ""
        between = prompt.rpartition(last)[2] if last else ""
        start, end = -1, text.find(turn_end, at)
        if text.startswith(prompt):
            start = len(prompt)
        elif between and between in text[:at]:  # Mistral's moves the tools to the last question
            start = text.rindex(between, 0, at) + len(between)
        if start < 0 or end < 0 or turn_end in text[start:at]:
            allowed = "one that leaves earlier turns as they are and ends every turn alike"
            raise UserError("data.messages_field", Said("tool calls in an unusual chat template"), allowed)
        return start, end + len(turn_end)

    def _turn_end(self, tools: Any) -> str:
        """The token that ends the assistant's turns."""
        text = self._fill([{"role": "user", "content": "a"}, {"role": "assistant", "content": _OPEN}], tools)
        at = text.find(_OPEN) + 1
        return text[at : self._end_of_turn(text, at)].strip() or "\0"

    def _end_of_turn(self, text: str, end: int) -> int:
        """Behind the special token that directly follows, white space between them; else where the message ends."""
        at = end + len(text[end:]) - len(text[end:].lstrip())
        return next((at + len(token) for token in self._ends if text.startswith(token, at)), end)

    def _fill(self, messages: Sequence[dict[str, Any]], tools: Any = None, **options: Any) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.template if tools is None else self.tool_template
        try:
            chats = [[dict(message) for message in messages]]
            filled = render_jinja_template(chats, tools, chat_template=_FIXED_DATE + template, **options, **self._names)
        except Exception as error:  # whatever the template's own code raises
            raise BadLine("no chat", reason_of(error, 100), "a chat that the chat template takes") from None
        return str(filled[0][0])


def _changed(messages: Sequence[dict[str, Any]]) -> UserError:
    if any("tool_calls" in message for message in messages):
        return _unwritten("tool calls")
    allowed = "a template that writes the assistant's messages as they are (thoughts by their key reasoning_content)"
    return UserError("data.messages_field", "a chat template that changes messages", allowed)


def _unwritten(what: str) -> UserError:
    allowed = f"a tokenizer whose chat template has tool support, or chats without {what}"
    return UserError("data.messages_field", Said(f"{what} that the tokenizer's chat template does not write"), allowed)


def _is_learnt(message: Mapping[str, Any]) -> bool:
    """Whether it is the assistant's, without OpenAI's weight 0."""
    return message["role"] == "assistant" and message.get("weight") != 0


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The assistant's with marks inside its outer white space, which templates trim; or around its last call's name."""
    if not _is_learnt(message):
        return dict(message)
    if "tool_calls" in message:
        *calls, last = message["tool_calls"]
        function = {**last["function"], "name": f"{_OPEN}{last['function']['name']}{_CLOSE}"}
        return {**message, "tool_calls": [*calls, {**last, "function": function}]}
    content = message["content"]
    core = content.strip()
    start = len(content) - len(content.lstrip())
    return {**message, "content": f"{content[:start]}{_OPEN}{core}{_CLOSE}{content[start + len(core) :]}"}
