"""Words that hold, and options to choose from or refuse, each against its formula."""

import math

import pytest
import torch
from support.numerics import assert_close
from support.tiny import NUM, tiny_causal_lm
from support.words import Words
from torch import Tensor

from cqwen_dist.config import UserError
from cqwen_dist.generate.continuation import padded
from cqwen_dist.generate.decisions import choose, multi_label
from cqwen_dist.model import CausalQwenForCausalLM
from cqwen_dist.ops.cauchy import Cauchy

PROMPTS = ["w3 w8 99.9 w41 w7", "w60 w2"]
TARGET = {"name": "standardise", "median": 150.0, "scale": 40.0}


@pytest.fixture(scope="module")
def model() -> CausalQwenForCausalLM:
    lm = tiny_causal_lm(target=TARGET, number_dims=2)
    with torch.no_grad():
        lm.model.abduction.set_scale(0.02)
        lm.model.action.threshold.normal_(1.0, 0.2)
    return lm


@torch.no_grad()
def at_every_position(model: CausalQwenForCausalLM, text: str) -> tuple[list[int], list[float], Cauchy, Cauchy]:
    """(ids, values, S, Y) of one text, materialised."""
    ids, values = Words().encode(text)
    loc_s, scale_s, loc_y, scale_y = model.model(
        torch.tensor([ids]), torch.tensor([values], dtype=torch.float64), torch.ones(1, len(ids))
    )
    return ids, values, Cauchy(loc_s[0], scale_s[0]), Cauchy(loc_y[0], scale_y[0])


def p_behind(model: CausalQwenForCausalLM, prompt: str) -> Tensor:
    s = at_every_position(model, prompt)[2]
    return s.sf(model.model.action.threshold.detach())[-1]


def test_multi_label_returns_every_word_above_the_threshold(model: CausalQwenForCausalLM) -> None:
    batch = padded(model, Words(), [Words().encode(prompt) for prompt in PROMPTS])
    found = multi_label(model, batch, 0.6)
    for row, prompt in enumerate(PROMPTS):
        p = p_behind(model, prompt)[: NUM + 1]
        assert {h.id for h in found[row]} == set((p > 0.6).nonzero()[:, 0].tolist())
        assert [h.p for h in found[row]] == sorted((h.p for h in found[row]), reverse=True)
        assert_close(torch.tensor([h.p for h in found[row]]), p[[h.id for h in found[row]]], 1e-4)
        for h in found[row]:
            assert h.strength == pytest.approx(math.tan(math.pi * (h.p - 0.5)), rel=1e-6)
    assert any(len(row) > 1 for row in found)
    assert all(len(row) <= 1 for row in multi_label(model, batch, 0.9999999))
    scores = at_every_position(model, PROMPTS[0])[2]
    strict = {int(i) for i in (scores.sf(1.5)[-1][: NUM + 1] > 0.3).nonzero()}
    some = [int(h.id) for h in multi_label(model, batch, 0.3, decision_threshold=1.5)[0]]
    assert set() != strict == set(some) != {h.id for h in multi_label(model, batch, 0.3)[0]}
    with pytest.raises(UserError, match="prob_threshold"):
        multi_label(model, batch, 1.0)


def test_choose_returns_the_best_option_or_none(model: CausalQwenForCausalLM) -> None:
    options = ["w9", "w17", "w4 w4"]
    chosen = choose(model, Words(), PROMPTS, options)
    for prompt, choice in zip(PROMPTS, chosen, strict=True):
        p = p_behind(model, prompt)
        assert choice.p["w9"] == pytest.approx(float(p[9]), rel=1e-4)
        assert choice.p["w17"] == pytest.approx(float(p[17]), rel=1e-4)
        again = p_behind(model, f"{prompt} w4")  # an option's P is the product over its tokens
        assert choice.p["w4 w4"] == pytest.approx(float(p[4] * again[4]), rel=1e-4)
        assert choice.option == max(choice.p, key=choice.p.__getitem__)
    best = max(chosen[0].p.values())
    assert choose(model, Words(), PROMPTS[:1], options, best * 0.999)[0].option is not None
    assert choose(model, Words(), PROMPTS[:1], options, min(1.0, best * 1.001))[0].option is None
    for prompt, text in (("", "w1"), ("w1", " ")):
        with pytest.raises(UserError, match="no tokens"):
            choose(model, Words(), [prompt], [text])
    for bad, limit in ((["w1", "w1"], 0.0), ([], 0.0), (["w1"], 1.5), (["w1 5", "w1 6"], 0.0)):
        with pytest.raises(UserError):
            choose(model, Words(), PROMPTS, bad, limit)
