"""Streams of generated text, and stop strings. Numbers are part of the text."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from cqwen_dist.config.errors import UserError
from cqwen_dist.generate.numbers import Digits, GeneratedNumbers


class Tokenizer(Protocol):
    """The part of `data.tokenizer.NumericalAwareTokenizer` that this folder uses."""

    num_token_id: int

    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int: ...
    @property
    def digit_rows(self) -> list[int]: ...
    def encode(self, text: str, begin: bool = True) -> tuple[list[int], list[float]]: ...
    def decode(self, ids: list[int], values: list[float] | None = None) -> str: ...
    def writing_as(self, text: str) -> "Tokenizer": ...


def reader(tokenizer: Any) -> Tokenizer:
    """The `NumericalAwareTokenizer` inside a `CausalQwenTokenizer` (its `encode` returns only ids), or the argument."""
    return getattr(tokenizer, "reader", tokenizer)


def as_prompt(tokenizer: Tokenizer, prompt: str, stop: Sequence[str]) -> Tokenizer:
    """The tokenizer, but it writes numbers as the prompt does; plainly if a stop string may be in one, as `generate`
    looks for it in plain ones."""
    return tokenizer if set("0123456789.,") & {*"".join(stop)} else tokenizer.writing_as(prompt)


def text_of(
    tokenizer: Tokenizer, ids: Tensor, numbers: GeneratedNumbers, row: int, start: int, end: int, digits: Digits
) -> str:
    """The text of positions [start, end) of a row of ids [B,T'], numbers with `digits`."""
    written, own = ~numbers.given[row, :end], ids[row, :end]
    places = (written[start:].nonzero()[:, 0] + start).tolist()
    text = tokenizer.decode(own[places].tolist(), [numbers.written(row, t, digits) for t in places])
    start = int(written[:start].sum())
    return gap(own[written], start, tokenizer.num_token_id) + text


def gap(ids: Tensor, start: int, number: int) -> str:
    """A space if ids [t] have a number at `start` directly after a number, else "". number: the id of <NUM>."""
    return " " if 0 < start < len(ids) and ids[start - 1] == ids[start] == number else ""


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text cut after its first stop string, and True if it has one."""
    ends = [text.find(s) + len(s) for s in stop if s in text]
    return text[: min(ends, default=None)], bool(ends)


def ends_at(
    strings: Sequence[str], tokenizer: Tokenizer, prompt: int, digits: Digits
) -> Callable[[Tensor, GeneratedNumbers], Tensor]:
    """A function that returns the rows [B] of ids [B,t] with a stop string after the prompt of width `prompt`.

    Raises `UserError` for an empty string or a value that is not a string.
    """
    odd = [s for s in strings if not isinstance(s, str) or not s]
    if odd:
        raise UserError("stop", odd[0] or "an empty string", "some text")
    # Only the tail can contain a new stop string: each token has at least one byte, and a number is one token
    tail = 2 + max(len(s.encode(errors="replace")) for s in strings)

    def ended(ids: Tensor, numbers: GeneratedNumbers) -> Tensor:
        start, end = max(prompt, ids.shape[1] - tail), ids.shape[1]
        texts = (text_of(tokenizer, ids, numbers, row, start, end, digits) for row in range(len(ids)))
        return torch.tensor([any(s in text for s in strings) for text in texts], device=ids.device)

    return ended


class NumberStreamer(BaseStreamer):
    """A streamer for `generate`: passes on the text of one row, including numbers, during generation.

    on_text: called with each new piece of text, never empty. A piece may end inside a word, never inside a character.
    ends: end token ids, which are left out; default: the tokenizer's end token. stop: strings that end the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        on_text: Callable[[str], None],
        digits: Digits = "auto",
        ends: Sequence[int] = (),
        stop: Sequence[str] = (),
    ) -> None:
        self.stop = stop
        self.tokenizer, self.on_text, self.digits = tokenizer, on_text, digits
        self.ends: Sequence[int | None] = ends or [tokenizer.eos_token_id]
        self._sent = ""
        self._text = ""
        self._fixed = (0, "")  # tokens after the prompt whose text is final, since it was sent
        self._whole = (0, "")  # as many tokens as possible whose whole text was sent

    def put(self, value: Tensor, numbers: GeneratedNumbers | None = None, prompt: int = 0) -> None:
        """value: all ids so far [1,t], including `prompt` ids of the prompt. numbers: their numbers.

        Raises `UserError` for a batch, or if the `generate` of a different model calls it.
        """
        if value.ndim != 2 or value.shape[0] != 1 or numbers is None:
            raise UserError("streamer", f"{tuple(value.shape)}", "one prompt, generated by CausalQwenForCausalLM")
        end = value.shape[1] - int(int(value[0, -1]) in self.ends or bool(numbers.abstained[0, -1]))
        end = max(prompt, end)
        self._text = self._read(value, numbers, prompt, end)
        if not self._text.startswith(self._sent):
            # This token gives an earlier number a different form (the 12 of 12:30 is written 12.0), but that was sent
            self._fixed = self._whole
            self._text = self._read(value, numbers, prompt, end)
        # The end may still change: an incomplete character, or a blank that depends on the token after a number
        self._send(self._text.rstrip("\ufffd").rstrip())
        if self._sent == self._text:
            self._whole = (end - prompt, self._text)

    def _read(self, ids: Tensor, numbers: GeneratedNumbers, start: int, end: int) -> str:
        count, text = self._fixed
        return cut(text + text_of(self.tokenizer, ids, numbers, 0, start + count, end, self.digits), self.stop)[0]

    def end(self) -> None:
        """Pass on the remaining text."""
        self._send(self._text)
        self._sent, self._text, self._fixed, self._whole = "", "", (0, ""), (0, "")

    def _send(self, text: str) -> None:
        if text.startswith(self._sent) and len(text) > len(self._sent):
            self.on_text(text[len(self._sent) :])
            self._sent = text
