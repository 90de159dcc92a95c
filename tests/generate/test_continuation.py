"""Text in, text out: padding, numbers in the text and in the records, the end of a row."""

from __future__ import annotations

import json

import pytest
import torch
from support.tiny import NUM, tiny_causal_lm

from cqwen_dist.config import UserError
from cqwen_dist.generate.continuation import continue_text
from cqwen_dist.model import CausalQwenForCausalLM

EOS = 5


class Words:
    """A tokenizer of words `w12` and numbers, apart by spaces."""

    num_token_id = NUM
    eos_token_id = EOS
    pad_token_id = 0

    def encode(self, text: str) -> tuple[list[int], list[float]]:
        words = text.split()
        ids = [int(w[1:]) if w.startswith("w") else NUM for w in words]
        return ids, [0.0 if w.startswith("w") else float(w) for w in words]

    def decode(self, ids: list[int], values: list[float]) -> str:
        return "".join(f" {v!r}" if i == NUM else f" w{i}" for i, v in zip(ids, values, strict=True))


@pytest.fixture(scope="module")
def model() -> CausalQwenForCausalLM:
    lm = tiny_causal_lm(target={"name": "standardise", "median": 150.0, "scale": 40.0})
    with torch.no_grad():
        lm.model.abduction.set_scale(0.05)
        lm.model.action.threshold.fill_(1.0)
        lm.model.action.threshold[NUM] = -0.5
    return lm


def test_a_batch_says_what_each_prompt_says_alone(model: CausalQwenForCausalLM) -> None:
    prompts = ["w3 w8 99.9 w41 w7", "-12.5", "w60 w2"]
    together = continue_text(model, Words(), prompts, max_new_tokens=10)
    alone = [continue_text(model, Words(), [p], max_new_tokens=10)[0] for p in prompts]
    assert [w.text for w in together] == [w.text for w in alone]
    assert [w.prompt for w in together] == prompts
    assert any(w.numbers for w in together)
    for written in together:
        ids, values = Words().encode(written.text)
        assert EOS not in ids
        shown = [v for i, v in zip(ids, values, strict=True) if i == NUM]
        assert shown == [float(f"{n.value:.6g}") for n in written.numbers]
        for number in written.numbers:
            assert number.low < number.value < number.high
            assert 0.0 < number.p_num <= 1.0
        json.loads(json.dumps(written.to_dict(), allow_nan=False))


def test_eos_ends_the_text(model: CausalQwenForCausalLM) -> None:
    class EndsEarly(Words):
        def __init__(self, eos: int) -> None:
            self.eos_token_id = eos

    plain = continue_text(model, Words(), ["w3 w8 w41"], max_new_tokens=8)[0]
    ids, _ = Words().encode(plain.text)
    assert len(set(ids)) > 1
    eos = next(i for i in ids if i != ids[0])
    ended = continue_text(model, EndsEarly(eos), ["w3 w8 w41"], max_new_tokens=8)[0]
    assert Words().encode(ended.text)[0] == ids[: ids.index(eos)]


def test_an_empty_prompt_and_an_unknown_mode_are_the_users(model: CausalQwenForCausalLM) -> None:
    with pytest.raises(UserError, match="prompt: found no tokens"):
        continue_text(model, Words(), ["w3", "  "])
    with pytest.raises(UserError, match="mode: found 'best', allowed: standard, causal"):
        continue_text(model, Words(), ["w3"], mode="best")
    with pytest.raises(UserError, match="at most 64, the model's context"):
        continue_text(model, Words(), ["w3 " * 65])
