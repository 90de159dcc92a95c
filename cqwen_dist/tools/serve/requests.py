"""Requests of OpenAI's protocol as options of `continue_text`, and the answers in its form.

Fields that a CausalQwen has and OpenAI does not: `mode`, `word_temperature`, `top_k`, `digits`, `abstain` in a request,
`numbers` in a choice and in a chunk of a stream; a finish_reason that OpenAI has not: abstain. An unknown field is
refused, so that no option is silently without effect.
"""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from cqwen_dist.config.errors import BadLine, UserError
from cqwen_dist.data.chat import Chat, messages_of
from cqwen_dist.generate.continuation import Written
from cqwen_dist.generate.generation_settings import mode_as_asked
from cqwen_dist.generate.numbers import NumberRecord

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "abstain": "abstain"}  # `Written.end` -> OpenAI's word
# Fields that clients send though they ask for nothing, and the values with which they do. null is one for each field.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("logprobs", "echo", "store", "use_beam_search"), (False,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("logit_bias", "metadata"), ({},)),
    **dict.fromkeys(("best_of", "repetition_penalty"), (1,)),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
}
_ELSEWHERE = {  # what to do instead
    **dict.fromkeys(("logprobs", "echo"), "; log P of given words: model(...).logits, lm-eval"),
    **dict.fromkeys(("tools", "functions"), "; chats with tools: tokenizer.apply_chat_template and model.generate"),
}


class Asked(BaseModel):
    """Fields of both completions and chats."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    word_temperature: float | Literal["auto"] = "auto"
    top_p: float | None = Field(None, gt=0, le=1)
    n: int = Field(1, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    user: str | None = None
    mode: str | dict[str, str] | None = None
    top_k: int | None = Field(None, ge=1)
    digits: int | Literal["auto"] = "auto"
    abstain: float | None = Field(None, gt=0, lt=1)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        """Drop fields that ask for nothing. Refuse true where a number belongs."""
        if not isinstance(body, dict):
            return body
        kept = {name: value for name, value in body.items() if value is not None}
        for name in NEUTRAL.keys() & kept.keys():
            found = kept.pop(name)
            if not any(found == one and isinstance(found, bool) == isinstance(one, bool) for one in NEUTRAL[name]):
                allowed = " or ".join(map(json.dumps, NEUTRAL[name])) + ", or no such field" + _ELSEWHERE.get(name, "")
                raise _refused(name, found, allowed)
        for name in kept.keys() & cls.model_fields.keys() - {"stream"}:
            if isinstance(kept[name], bool):
                raise _refused(name, kept[name], "a number or text")
        return kept

    @property
    def stops(self) -> list[str]:
        """The strings that end a text; an answer leaves them out."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def options(self, most_tokens: int) -> dict[str, Any]:
        """Keywords of `continue_text`. most_tokens: more are not written, whatever max_tokens is.

        Without a mode, `temperature`, `top_p` or `top_k` draws from softmax (mode compatible), as OpenAI's clients
        expect: a temperature of 1 too.
        """
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given = {name: value for name, value in given.items() if value is not None}
        mode = self.mode
        if mode is None or (mode == "standard" and self.temperature == 0):
            mode, given = mode_as_asked(given | ({"do_sample": True} if given else {}))
        options: dict[str, Any] = {
            "mode": mode,
            "max_new_tokens": min(256 if self.max_tokens is None else self.max_tokens, most_tokens),
            "seed": self.seed,
            "digits": self.digits,
            "word_temperature": self.word_temperature,
            "stop": self.stops,
            **({} if self.abstain is None else {"abstain": self.abstain}),
        }
        return options | given


def _refused(name: str, found: Any, allowed: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{said}", {"said": str(UserError(name, found, allowed)), "field": name})


class Completion(Asked):
    """POST /v1/completions."""

    prompt: str | list[str]

    def prompts(self, tokenizer: Any) -> list[str]:
        """The texts to continue."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class ChatTurn(BaseModel):
    """A turn of a chat, with its further fields, such as reasoning_content. content: text, or parts that are texts."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatCompletion(Asked):
    """POST /v1/chat/completions."""

    messages: list[ChatTurn] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    def prompts(self, tokenizer: Any) -> list[str]:
        """The turns as the chat template writes them, read as training reads a chat. Raises `UserError`."""
        try:
            turns = messages_of([message.model_dump(exclude_none=True) for message in self.messages])
        except BadLine as bad:
            raise UserError("messages", bad.found, bad.allowed) from None
        return [Chat(tokenizer.tokenizer).prompt(turns, "messages")]

    def options(self, most_tokens: int) -> dict[str, Any]:
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        asked = self.model_copy(update={"max_tokens": most})
        return {**Asked.options(asked, most_tokens), "begin": False}


class Counterfactual(BaseModel):
    """POST /v1/counterfactual: `generate.facts.counterfactual`."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    fact: str
    observed: float | str
    what_if: str
    seed: int = 0


class Answer:
    """The documents that answer one request."""

    def __init__(self, asked: Asked, model: str) -> None:
        self.chat, self.stop = isinstance(asked, ChatCompletion), asked.stops
        kind = "chat.completion" if self.chat else "text_completion"
        self.head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.whole_kind, self.piece_kind = kind, f"{kind}.chunk" if self.chat else kind

    def whole(self, written: Sequence[Written], prompt_tokens: int) -> dict[str, Any]:
        """All texts at once."""
        choices = []
        for index, each in enumerate(written):
            text = each.text[: len(each.text) - stop_at_end(each.text, self.stop)]
            said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            end = {"finish_reason": FINISH[each.end], "logprobs": None}
            choices.append({"index": index, **said, **end, "numbers": each.numbers})
        return {**self.head, "object": self.whole_kind, "choices": choices, "usage": usage(written, prompt_tokens)}

    def piece(self, text: str, numbers: Sequence[NumberRecord], end: str | None = None) -> dict[str, Any]:
        """A chunk of a stream. numbers: those written since the last chunk. end: `Written.end`, in the last one."""
        said = {"delta": {"content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **said, "finish_reason": None if end is None else FINISH[end], "logprobs": None}
        return {**self.head, "object": self.piece_kind, "choices": [{**choice, "numbers": numbers}]}

    def last(self, written: Sequence[Written], prompt_tokens: int) -> dict[str, Any]:
        """The chunk after the last text, for `stream_options: {include_usage: true}`."""
        return {**self.head, "object": self.piece_kind, "choices": [], "usage": usage(written, prompt_tokens)}


def stop_at_end(text: str, stop: Sequence[str]) -> int:
    """The length of the longest stop string with which the text ends; 0 without one."""
    return max((len(s) for s in stop if text.endswith(s)), default=0)


def usage(written: Sequence[Written], prompt_tokens: int) -> dict[str, int]:
    """Counts of tokens; a number is one."""
    tokens = sum(len(each.tokens) for each in written)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
