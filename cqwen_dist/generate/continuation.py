"""Text to text generation, as used by the command line and the quickstart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.batch import Padded, pad_rows
from cqwen_dist.config.errors import UserError
from cqwen_dist.generate.modes import ModeName, mode_names
from cqwen_dist.generate.numbers import Digits, GeneratedNumbers, NumberRecord, check_digits
from cqwen_dist.generate.streaming import NumberStreamer, Tokenizer, as_prompt, cut, reader, text_of

Prompt = str | tuple[str, ...]  # a text; or its parts, which are encoded one by one as in training


@dataclass(frozen=True)
class TokenRecord:
    """A generated token."""

    id: int
    p: float  # P of this word
    p_num: float  # P of <NUM> at this position
    individual: float  # scale_S of this word from the individual, |W| scale_U
    noise: float  # and from the noise, |W| |b_noise|
    number: NumberRecord | None = None


@dataclass(frozen=True)
class Written:
    """The continuation of a prompt."""

    prompt: str
    text: str
    tokens: list[TokenRecord]  # without the end token
    end: str  # reason of the end: eos, stop, length or abstain

    @property
    def numbers(self) -> list[NumberRecord]:
        """The numbers among the tokens."""
        return [token.number for token in self.tokens if token.number is not None]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "numbers": [asdict(number) for number in self.numbers]}


def end_ids(model: Any, tokenizer: Tokenizer) -> list[int]:
    """The end token ids of the tokenizer and of the model's generation config (such as the end of a chat turn)."""
    own = model.generation_config.eos_token_id
    found = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    return [id_ for id_ in dict.fromkeys(found) if id_ is not None]


def padded(model: Any, tokenizer: Tokenizer, rows: Sequence[tuple[list[int], list[float]]]) -> Padded:
    """Pad texts (ids, values) on the left into one batch. Raises `UserError` for no text or a text without tokens.

    The batch is on the device of the model's first weight that accelerate has not offloaded.
    """
    if not rows or any(not ids for ids, _ in rows):
        raise UserError("prompt", "no tokens", "some text")
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    return Padded(*(part.to(device) for part in pad_rows(rows, tokenizer.pad_token_id, on_left=True)))


def encoded(tokenizer: Tokenizer, prompt: Prompt, begin: bool = True) -> tuple[list[int], list[float]]:
    """Ids and values of a prompt."""
    parts = (prompt,) if isinstance(prompt, str) else prompt
    found = [tokenizer.encode(part, begin and not i) for i, part in enumerate(parts)]
    return [id_ for ids, _ in found for id_ in ids], [value for _, values in found for value in values]


def generate_batch(
    model: Any, tokenizer: Tokenizer, prompts: Sequence[Prompt], begin: bool = True, **options: Any
) -> tuple[Tensor, GeneratedNumbers, int]:
    """Continue prompts as one batch. Returns (ids [B,T'], their numbers, prompt width T).

    model: a `CausalQwenForCausalLM`. begin: False for chats, which begin as their template writes them.
    options: for its `generate`. Raises `UserError`.
    """
    tokenizer = reader(tokenizer)
    if list(tokenizer.digit_rows) != list(model.config.digit_rows):
        allowed = "as the model was trained: load the tokenizer of its folder, or use NumberPolicy(digits=...)"
        raise UserError("tokenizer: digits in view", bool(tokenizer.digit_rows), allowed)
    batch = padded(model, tokenizer, [encoded(tokenizer, prompt, begin) for prompt in prompts])
    ids, numbers = model.generate(
        batch.ids,
        batch.values,
        return_numbers=True,
        return_dict_in_generate=False,  # overrides the model's generation config
        attention_mask=batch.mask,
        eos_token_id=end_ids(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        tokenizer=tokenizer,
        **options,
    )
    return ids, numbers, batch.ids.shape[1]


def continue_text(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    mode: ModeName | None = None,
    max_new_tokens: int = 64,
    seed: int | None = None,
    digits: Digits = "auto",
    stop: Sequence[str] = (),
    on_text: Callable[[str], None] | None = None,
    **options: Any,
) -> list[Written]:
    """Continue prompts as one left-padded batch.

    model: a `CausalQwenForCausalLM`. mode: None: as `generate` without one. digits: digits of numbers in the text
    (`generate.numbers.shown`). stop: strings that end a text; the text includes them. on_text: called with new text,
    for a single prompt. options: for `generate_batch`. Raises `UserError` for an empty prompt and as `generate`.
    """
    check_digits(digits)
    tokenizer = reader(tokenizer)
    ends = end_ids(model, tokenizer)
    if on_text is not None:
        if len(prompts) != 1:
            raise UserError("stream", f"{len(prompts)} prompts", "one")
        own = as_prompt(tokenizer, prompts[0], stop)
        options["streamer"] = NumberStreamer(own, on_text, digits=digits, ends=ends, stop=stop)
    if stop:
        options["stop_strings"] = list(stop)
    options |= {"mode": mode, "max_new_tokens": max_new_tokens, "seed": seed, "digits": digits}
    ids, numbers, width = generate_batch(model, tokenizer, prompts, **options)
    lengths = numbers.p_word[:, width:].isfinite().sum(1).tolist()  # the remaining positions are padding
    return [
        written_of(tokenizer, prompt, ids, numbers, row, width, width + lengths[row], ends, digits, stop)
        for row, prompt in enumerate(prompts)
    ]


def written_of(
    tokenizer: Tokenizer,
    prompt: str,
    ids: Tensor,
    numbers: GeneratedNumbers,
    row: int,
    start: int,
    end: int,
    ends: Sequence[int],
    digits: Digits,
    stop: Sequence[str],
) -> Written:
    """What positions [start, end) of a row of ids [B,T'] say. ends: end tokens. stop: strings that end the text."""
    reason = "length"
    if end > start and int(ids[row, end - 1]) in ends:
        end, reason = end - 1, "eos"
    elif end > start and bool(numbers.abstained[row, end - 1]):
        end, reason = end - 1, "abstain"
    text, stopped = cut(text_of(as_prompt(tokenizer, prompt, stop), ids, numbers, row, start, end, digits), stop)
    reason = "stop" if stopped else reason
    columns = (numbers.p_word, numbers.p_num, numbers.parts, numbers.given)
    p, p_num, parts, given = (column[row].tolist() for column in columns)
    chosen = [t for t in range(start, end) if not given[t]]
    tokens = [
        TokenRecord(int(ids[row, t]), p[t], p_num[t], parts[t][0], parts[t][1], numbers.record(row, t, digits))
        for t in chosen
    ]
    return Written(prompt, text, tokens, reason)


@dataclass(frozen=True)
class Diversity:
    """Diversity of n texts. distance: mean over pairs of 1 - shared words / all words."""

    n: int
    distinct: int
    distance: float

    @classmethod
    def of(cls, texts: Sequence[str]) -> Diversity:
        """Words are separated by blanks and counted once (Jaccard). Fewer than two texts have distance 0."""
        bags = [set(text.split()) for text in texts]
        pairs = [1 - len(a & b) / max(len(a | b), 1) for a, b in combinations(bags, 2)]
        return cls(len(texts), len(set(texts)), sum(pairs) / max(len(pairs), 1))


def counterfactuals(
    model: Any, tokenizer: Tokenizer, prompt: str, count: int, mode: ModeName = "individual", **options: Any
) -> list[Written]:
    """Continue one prompt for `count` individuals (seed S3 3.4.1), or for `count` noise draws (mode "noise", 3.4.2).
    Words or numbers may have another mode.

    With the same seed and count, the i-th individual is the same for all prompts: it has the same quantiles of U.
    options: for `continue_text`. Raises `UserError`.
    """
    if not {"individual", "noise"} & {*mode_names(mode)}:
        raise UserError("mode", mode, "individual, noise")
    if count < 1:
        raise UserError("individuals", count, "1 or more")
    return continue_text(model, tokenizer, [prompt] * count, mode=mode, **options)
