"""Text in, text out: what the command line and the quickstart use of generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from cqwen_dist.config import UserError

DIGITS = 6  # significant digits of a generated number in the text; its record holds the value itself


class Tokenizer(Protocol):
    """What is used of `data.tokenizer.NumericalAwareTokenizer`."""

    num_token_id: int

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int: ...

    def encode(self, text: str) -> tuple[list[int], list[float]]: ...

    def decode(self, ids: list[int], values: list[float]) -> str: ...


@dataclass(frozen=True)
class WrittenNumber:
    """A number the model wrote, in the raw unit, with its central 90 % interval and P(<NUM>)."""

    value: float
    low: float
    high: float
    p_num: float


@dataclass(frozen=True)
class Written:
    """One prompt's continuation."""

    prompt: str
    text: str
    numbers: list[WrittenNumber]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def continue_text(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    mode: str = "standard",
    max_new_tokens: int = 64,
    seed: int | None = None,
    **options: Any,
) -> list[Written]:
    """Continue prompts as one left-padded batch.

    model: a `CausalQwenForCausalLM`. options: further options of `generate.generator.generate`. Raises `UserError`
    for an empty prompt and what `generate` refuses.
    """
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    if any(not ids for ids, _ in encoded):
        raise UserError("prompt", "no tokens", "some text")
    width = max(len(ids) for ids, _ in encoded)
    ids = torch.full((len(encoded), width), tokenizer.pad_token_id, dtype=torch.int64)
    values = torch.zeros(ids.shape, dtype=torch.float64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (tokens, numbers) in enumerate(encoded):
        at = slice(width - len(tokens), width)
        ids[row, at], values[row, at] = torch.tensor(tokens), torch.tensor(numbers, dtype=torch.float64)
        mask[row, at] = True
    device = next(model.parameters()).device
    out, numbers_out = model.generate(
        ids.to(device),
        values.to(device),
        mode=mode,
        return_numbers=True,
        attention_mask=mask.to(device),
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=seed,
        **options,
    )
    low, high = numbers_out.interval(0.9)
    result = []
    for row, prompt in enumerate(prompts):
        new = out[row, width:].tolist()
        end = next((i for i, token in enumerate(new) if token == tokenizer.eos_token_id), len(new))
        shown = [float(f"{v:.{DIGITS}g}") for v in numbers_out.values[row, width : width + end].tolist()]
        text = tokenizer.decode(new[:end], shown)
        written = [
            WrittenNumber(
                float(numbers_out.values[row, t]),
                float(low[row, t]),
                float(high[row, t]),
                float(numbers_out.p_num[row, t]),
            )
            for t in range(width, width + end)
            if bool(numbers_out.generated[row, t])
        ]
        result.append(Written(prompt, text, written))
    return result
