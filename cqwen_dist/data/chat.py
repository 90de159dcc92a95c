"""Chats to text with the tokenizer's chat template, and the character spans that the assistant wrote.

Few templates mark the assistant's part (`{% generation %}`), and Qwen's do not. So the template is rendered twice: once
as given, and once with two noncharacters around each assistant message. The learnt span starts where generation would
start (or at the message) and ends after the end-of-turn token. Without the noncharacters both renderings must be equal.

Some templates split a thought from the answer at `</think>`. They get the thought in its own key (`_wordings`). What a
template does not write is counted. Tool calls are not read.

Templates that print today's date get a fixed date, so that texts do not change from day to day.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from cqwen_dist.config.errors import BadLine, UserError, reason_of
from cqwen_dist.data.cells import Literal, as_text

# Qwen's format, for a tokenizer without a template.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The default date in Llama 3's template
_DATE = {"%d": "26", "%b": "Jul", "%B": "July", "%m": "07", "%Y": "2024"}
FIXED_DATE = (
    "{% macro strftime_now(form) %}{{ form"
    + "".join(f"|replace('{part}', '{value}')" for part, value in _DATE.items())
    + " }}{% endmacro %}{{ '' }}"  # jinja would trim a line end directly after the macro
)
_THOUGHT, _THOUGHT_END = "reasoning_content", "</think>"
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: Unicode never assigns them, so texts do not use them

_KEY = "data.messages_field"
READ_SO = "read so: "  # the kind of a part that is used, but perhaps not as its author meant it
Spans = tuple[tuple[int, int], ...]
ROLES = ("system", "developer", "user", "assistant")
_SHAREGPT = {**dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"), "human": "user"}


class Chat:
    """Renders a chat template. Args: tokenizer: a transformers tokenizer; None: ChatML."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.template = CHATML
        self._names: dict[str, Any] = {}
        self._ends: tuple[str, ...] = ("<|im_end|>",)
        if tokenizer is not None:
            if tokenizer.chat_template:  # a template, or a dict of named templates
                self.template = tokenizer.get_chat_template()
            self._names = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
            special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
            self._ends = tuple(sorted(special | set(self._ends), key=len, reverse=True))

    def __call__(self, messages: Sequence[dict[str, Any]]) -> tuple[str, Spans, tuple[str, ...]]:
        """Render a chat; returns the text, its learnt spans, and notes on parts that are not learnt or not written.

        messages: from `messages_of`. Raises: BadLine; UserError for a broken template.
        """
        own = sum(map(_is_learnt, messages))
        if not own:
            roles = [message["role"] for message in messages]
            raise BadLine("no chat", roles, "a turn of the assistant, not of weight 0 and not of train: false")
        messages, plain, pieces = self._rendered(messages, 2 * own + 1)
        ends = list(accumulate(map(len, pieces)))
        spans = zip(ends[:-1:2], ends[1::2], strict=True)  # every second piece is between two marks
        learnt = tuple((self._begin(plain, start), self._end_of_turn(plain, end)) for start, end in spans)
        return plain, learnt, (*_unused(messages, plain), *self._controlling(messages))

    def _rendered(
        self, messages: Sequence[dict[str, Any]], count: int
    ) -> tuple[Sequence[dict[str, Any]], str, list[str]]:
        """Returns the messages as the template takes them, the text, and its `count` pieces between the marks."""
        how = "a template that writes the assistant's messages as they are (thoughts by their key reasoning_content)"
        refused: UserError | BadLine = UserError(_KEY, "a chat template that changes messages", how)
        for said in _wordings(messages):
            try:
                plain = self._fill(said)
                marked = self._fill([_marked(message) for message in said])
            except BadLine as bad:  # in the chat's own form this is the reason; a different form may suit the template
                refused = bad if said is messages else refused
                continue
            if _OPEN in plain or _CLOSE in plain:
                raise BadLine("no chat", plain, "no noncharacters U+FDD0, U+FDD1")
            pieces = marked.replace(_CLOSE, _OPEN).split(_OPEN)
            # The marks must be the only difference: otherwise the spans would be wrong.
            if "".join(pieces) == plain and len(pieces) == count:
                return said, plain, pieces
        raise refused

    def prompt(self, messages: Sequence[dict[str, Any]], key: str) -> str:
        """Prompt for the assistant's next turn. messages: from `messages_of`. Raises: UserError for `key`."""
        refused: list[BadLine] = []
        for said in _wordings(messages):
            try:
                return self._fill(said, add_generation_prompt=True)
            except BadLine as bad:
                refused.append(bad)
        raise UserError(key, refused[0].found, refused[0].allowed)

    def question(self, text: str) -> str:
        """Prompt for a single user message. Raises `UserError`."""
        return self.prompt([{"role": "user", "content": text}], "--chat")

    def _controlling(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Say where a turn's own text has a control token: it acts as one, in `serve` too."""
        for message in messages:
            said = str(message["content"])
            token = next((token for token in self._ends if token in said), None)
            if token is not None:
                yield f"{READ_SO}turn of the {message['role']} whose text has {token}, which acts as control token"

    @cached_property
    def turn_end(self) -> str:
        r"""Token that ends an assistant turn.

        Returns "\0", which no text contains, if there is no such token or if the template requires a system message.
        """
        try:
            text = self._fill([{"role": "user", "content": "a"}, {"role": "assistant", "content": _OPEN}])
        except BadLine:
            return "\0"
        at = text.find(_OPEN) + 1
        return text[at : self._end_of_turn(text, at)].strip() or "\0"

    def _begin(self, text: str, start: int) -> int:
        """Start of the assistant turn whose message starts at `start`.

        The two differ if the template writes something between them: Qwen3's inserts an empty thought or
        `reasoning_content`.
        """
        at = text.rfind(self._opening, 0, start)
        begin = at + len(self._opening)
        return start if at < 0 or (begin < start and self.turn_end in text[begin:start]) else begin

    @cached_property
    def _opening(self) -> str:
        """Text that the template writes before an answer; "" if it rejects a chat with one question."""
        asked = [{"role": "user", "content": "a"}]
        try:
            return self._fill(asked, add_generation_prompt=True).removeprefix(self._fill(asked))
        except BadLine:
            return ""

    def _end_of_turn(self, text: str, end: int) -> int:
        """Position after the special token that follows `end` (white space may precede it); `end` if there is none."""
        at = end + len(text[end:]) - len(text[end:].lstrip())
        return next((at + len(token) for token in self._ends if text.startswith(token, at)), end)

    def _fill(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            chats = [[dict(message) for message in messages]]
            template = FIXED_DATE + self.template
            filled = render_jinja_template(chats, None, chat_template=template, **options, **self._names)
        except Exception as error:  # template code can raise anything
            raise BadLine("no chat", reason_of(error, 100), "a chat that the chat template takes") from None
        return str(filled[0][0])


def _is_learnt(message: Mapping[str, Any]) -> bool:
    """Whether the assistant wrote it, and neither OpenAI's `weight` nor Axolotl's `train` excludes it."""
    return message["role"] == "assistant" and message.get("weight") != 0 and message.get("train", True) is not False


def _wordings(messages: Sequence[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    """The messages as given, then with thoughts in a key of their own, as some templates ask for."""
    yield messages
    if any(_THOUGHT_END in str(message["content"]) for message in messages if message["role"] == "assistant"):
        yield [_with_thought_apart(message) for message in messages]


def _with_thought_apart(message: dict[str, Any]) -> dict[str, Any]:
    """A thought before the answer in its own key, cut where Qwen3's template cuts."""
    thought, mark, answer = str(message["content"]).rpartition(_THOUGHT_END)
    if message["role"] != "assistant" or not mark:
        return message
    return {**message, _THOUGHT: thought.rpartition("<think>")[2].strip("\n"), "content": answer.lstrip("\n")}


def _unused(messages: Sequence[Mapping[str, Any]], plain: str) -> Iterator[str]:
    """Name each part of the chat that the model does not learn. plain: the rendered chat."""
    for message in messages:
        role = message["role"]
        if role == "assistant" and not _is_learnt(message):
            yield "turn of the assistant that is read, not learnt (weight: 0 or train: false)"
        if not _is_written(message.get(_THOUGHT), plain):
            yield "thought that the chat template does not write"
        if not _is_written(message["content"], plain):
            yield f"turn of the {role} that the chat template does not write"


def _is_written(said: object, plain: str) -> bool:
    """Whether a message is in the chat's text, as it is or as a JSON string."""
    core = str(said or "").strip()
    return core in plain or json.dumps(core, ensure_ascii=False)[1:-1] in plain


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """Mark an assistant message inside its outer white space, which templates trim."""
    if not _is_learnt(message):
        return dict(message)
    content = message["content"]
    core = content.strip()
    start = len(content) - len(content.lstrip())
    return {**message, "content": f"{content[:start]}{_OPEN}{core}{_CLOSE}{content[start + len(core) :]}"}


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
