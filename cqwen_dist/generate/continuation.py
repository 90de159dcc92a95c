"""Text in, text out: what the command line and the quickstart use of generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cqwen_dist.config import UserError
from cqwen_dist.generate.numbers import Digits, GeneratedNumbers, NumberRecord, check_digits
from cqwen_dist.generate.streaming import NumberStreamer, Tokenizer, reader, text_of


@dataclass(frozen=True)
class TokenRecord:
    """One token the model wrote: its id, P of this word and of <NUM> at its position, and the number if it is one."""

    id: int
    p: float
    p_num: float
    number: NumberRecord | None = None


@dataclass(frozen=True)
class Written:
    """One prompt's continuation; tokens without the end token; end: why it ended (eos, stop or length)."""

    prompt: str
    text: str
    tokens: list[TokenRecord]
    end: str

    @property
    def numbers(self) -> list[NumberRecord]:
        """Those among the tokens."""
        return [token.number for token in self.tokens if token.number is not None]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "numbers": [asdict(number) for number in self.numbers]}


class Padded(NamedTuple):
    """Prompts as one batch, padded on the left: [B,T] int64, float64, bool."""

    ids: Tensor
    values: Tensor
    mask: Tensor


def padded(tokenizer: Tokenizer, prompts: Sequence[str], device: torch.device) -> Padded:
    """Raises `UserError` for no prompt, and for one without tokens."""
    tokenizer = reader(tokenizer)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    if not encoded or any(not ids for ids, _ in encoded):
        raise UserError("prompt", "no tokens", "some text")
    width = max(len(ids) for ids, _ in encoded)
    ids = torch.full((len(encoded), width), tokenizer.pad_token_id, dtype=torch.int64)
    values = torch.zeros(ids.shape, dtype=torch.float64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (tokens, numbers) in enumerate(encoded):
        at = slice(width - len(tokens), width)
        ids[row, at], values[row, at] = torch.tensor(tokens), torch.tensor(numbers, dtype=torch.float64)
        mask[row, at] = True
    return Padded(ids.to(device), values.to(device), mask.to(device))


def input_device(model: Any) -> torch.device:
    """Where a model takes its ids: with its first weights that accelerate has not put aside."""
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))


def continue_text(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    mode: str = "standard",
    max_new_tokens: int = 64,
    seed: int | None = None,
    digits: Digits = "auto",
    stop: Sequence[str] = (),
    on_text: Callable[[str], None] | None = None,
    **options: Any,
) -> list[Written]:
    """Continue prompts as one left-padded batch.

    model: a `CausalQwenForCausalLM`. digits: of the numbers in the text (`generate.numbers.shown`). stop: strings that
    end a text, which then ends with one. on_text: called with the text as it comes, for one prompt. options: further
    ones of the model's `generate`. Raises `UserError` for an empty prompt and what `generate` refuses.
    """
    check_digits(digits)
    tokenizer = reader(tokenizer)
    if on_text is not None and len(prompts) != 1:
        raise UserError("stream", f"{len(prompts)} prompts", "one")
    batch = padded(tokenizer, prompts, input_device(model))
    if stop:
        options |= {"stop_strings": list(stop), "tokenizer": tokenizer}
    if on_text is not None:
        options["streamer"] = NumberStreamer(tokenizer, on_text, digits=digits)
    ids, numbers = model.generate(
        batch.ids,
        batch.values,
        mode=mode,
        return_numbers=True,
        attention_mask=batch.mask,
        max_new_tokens=max_new_tokens,
        eos_token_id=[] if tokenizer.eos_token_id is None else tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=seed,
        digits=digits,
        **options,
    )
    return [
        _written(tokenizer, prompt, ids, numbers, row, batch.ids.shape[1], stop, digits)
        for row, prompt in enumerate(prompts)
    ]


def _written(
    tokenizer: Tokenizer,
    prompt: str,
    ids: Tensor,
    numbers: GeneratedNumbers,
    row: int,
    width: int,
    stop: Sequence[str],
    digits: Digits,
) -> Written:
    """What a row holds behind the prompt's `width` positions."""
    new, known = ids[row, width:].tolist(), numbers.p_word[row, width:].isfinite().tolist()
    length, reason = sum(known), "length"  # behind `length` is padding
    if length and new[length - 1] == tokenizer.eos_token_id:
        length, reason = length - 1, "eos"
    end = width + length
    text = text_of(tokenizer, ids, numbers, row, width, end, digits)
    found = [text.find(s) + len(s) for s in stop if s in text]
    if found:
        text, reason = text[: min(found)], "stop"
    p, p_num = numbers.p_word[row].tolist(), numbers.p_num[row].tolist()
    tokens = [TokenRecord(new[t - width], p[t], p_num[t], numbers.record(row, t, digits)) for t in range(width, end)]
    return Written(prompt, text, tokens, reason)


@dataclass(frozen=True)
class Diversity:
    """How different texts are. distinct of n; distance: the mean over pairs of 1 - shared words / all words."""

    n: int
    distinct: int
    distance: float

    @classmethod
    def of(cls, texts: Sequence[str]) -> Diversity:
        """Words as blanks part them, each counted once (Jaccard); 0 of fewer than two texts."""
        bags = [set(text.split()) for text in texts]
        pairs = [1 - len(a & b) / max(len(a | b), 1) for a, b in combinations(bags, 2)]
        return cls(len(texts), len(set(texts)), sum(pairs) / max(len(pairs), 1))


def counterfactuals(
    model: Any, tokenizer: Tokenizer, prompt: str, count: int, mode: str = "individual", **options: Any
) -> list[Written]:
    """The same prompt under `count` individuals (seed S3 3.4.1), or under as many noises (mode "noise", 3.4.2).

    With the same seed and count, the i-th individual is the same for every prompt (`treatments`).
    options: of `continue_text`. Raises `UserError`.
    """
    if mode not in ("individual", "noise"):
        raise UserError("mode", mode, "individual, noise")
    if count < 1:
        raise UserError("individuals", count, "1 or more")
    return continue_text(model, tokenizer, [prompt] * count, mode=mode, **options)


@dataclass(frozen=True)
class Individual:
    """One individual under each of several treatments t, a prompt each: what is written, and Y(t) (seed S3 1).

    values: the first number of each text; differences: Y(t) - Y(t of the first prompt). None where there is no number.
    """

    texts: list[str]
    values: list[float | None]
    differences: list[float | None]


def treatments(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    count: int,
    mode: str = "individual",
    *,
    seed: int | None = None,
    **options: Any,
) -> list[Individual]:
    """The same `count` individuals under each of the prompts.

    An individual is its eps [C], uniform: it stands at the same quantiles of the law of U whatever the prompt makes of
    that law, u(t) = loc_U(t) + scale_U(t) tan(pi (eps - 1/2)) (S3 3.4.1). Mode "noise" keeps the noise instead. seed:
    None draws one for all. options: of `continue_text`. Raises `UserError`.
    """
    seed = int(torch.randint(1 << 62, ())) if seed is None else seed
    worlds = [counterfactuals(model, tokenizer, prompt, count, mode, seed=seed, **options) for prompt in prompts]
    found = []
    for written in zip(*worlds, strict=True):
        values = [w.numbers[0].value if w.numbers else None for w in written]
        first = values[0]
        differences = [None if first is None or value is None else value - first for value in values]
        found.append(Individual([w.text for w in written], values, differences))
    return found
