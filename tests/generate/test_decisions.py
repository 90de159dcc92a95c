"""Words that hold, options to choose from or refuse, continuations scored, each against its formula."""

from __future__ import annotations

import math

import pytest
import torch
from support.numerics import assert_close
from support.tiny import NUM, VOCAB, tiny_causal_lm
from support.words import Words
from torch import Tensor

from cqwen_dist.config import UserError
from cqwen_dist.generate.continuation import padded
from cqwen_dist.generate.decisions import choose, multi_label, score
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
    assert {h.id for h in multi_label(model, batch, 0.3, some[:1], 1.5)[0]} == set(some[:1])
    asked = multi_label(model, batch, 1e-6, words=[7, VOCAB - 1, 3])
    assert {h.id for h in asked[0]} <= {3, 7, VOCAB - 1}
    for options, match in (({"prob_threshold": 1.0}, "prob_threshold"), ({"words": [VOCAB]}, r"ids in \[0, 101\)")):
        with pytest.raises(UserError, match=match):
            multi_label(model, batch, **options)


def test_a_score_is_the_sum_over_its_positions(model: CausalQwenForCausalLM) -> None:
    continuations = ["w9 w4", "-12.5", "w1 250 w2 w80"]
    for prompt in PROMPTS:
        found = score(model, Words(), prompt, continuations)
        for text, s in zip(continuations, found, strict=True):
            before = len(Words().encode(prompt)[0])
            ids, values, scores, y = at_every_position(model, f"{prompt} {text}")
            at, new = list(range(before - 1, len(ids) - 1)), ids[before:]
            log_p = scores.log_sf(model.model.action.threshold.detach())[at, new]
            softmax = scores.loc.log_softmax(-1)[at, new]
            density = sum(
                -float(Cauchy(y.loc[t] * 40 + 150, y.scale[t] * 40).nll(values[t + 1])) for t in at if ids[t + 1] == NUM
            )
            assert s.tokens == len(new)
            assert s.log_p == pytest.approx(float(log_p.sum()), rel=1e-4)
            assert s.log_softmax == pytest.approx(float(softmax.sum()), rel=1e-4)
            assert s.log_density == pytest.approx(density, rel=1e-4)
    for prompt, text in (("", "w1"), ("w1", " ")):
        with pytest.raises(UserError, match="no tokens"):
            score(model, Words(), prompt, [text])


def test_choose_returns_the_best_option_or_none(model: CausalQwenForCausalLM) -> None:
    options = ["w9", "w17", "w4 w4"]
    chosen = choose(model, Words(), PROMPTS, options)
    for prompt, choice in zip(PROMPTS, chosen, strict=True):
        p = p_behind(model, prompt)
        assert choice.p["w9"] == pytest.approx(float(p[9]), rel=1e-4)
        assert choice.p["w17"] == pytest.approx(float(p[17]), rel=1e-4)
        assert choice.option == max(choice.p, key=choice.p.__getitem__)
    best = max(chosen[0].p.values())
    assert choose(model, Words(), PROMPTS[:1], options, best * 0.999)[0].option is not None
    assert choose(model, Words(), PROMPTS[:1], options, min(1.0, best * 1.001))[0].option is None
    for bad, limit in ((["w1", "w1"], 0.0), ([], 0.0), (["w1"], 1.5), (["w1 5", "w1 6"], 0.0)):
        with pytest.raises(UserError):
            choose(model, Words(), PROMPTS, bad, limit)
