"""How U decides: contributions that add up to the score, and individuals on a map, each against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.tiny import NUM, tiny_causal_lm
from support.words import Words

from cqwen_dist.config import UserError
from cqwen_dist.model import CausalQwenForCausalLM
from cqwen_dist.tools.report.why import map_plot, principal_axes, why

PROMPT = "w3 w8 99.9 w41 w7"


@pytest.fixture(scope="module", params=[0, 8])
def model(request: pytest.FixtureRequest) -> CausalQwenForCausalLM:
    lm = tiny_causal_lm(number_dims=request.param)
    with torch.no_grad():
        lm.model.abduction.set_scale(0.02)
        lm.model.action.cls_bias.normal_(0.0, 0.1)
        lm.model.action.threshold.normal_(1.0, 0.2)
    return lm


@torch.no_grad()
def individuals(model: CausalQwenForCausalLM) -> np.ndarray:
    """loc_U [T, words' dimensions] of the prompt."""
    ids, values = Words().encode(PROMPT)
    u = model.model.infer(torch.tensor([ids]), torch.tensor([values], dtype=torch.float64), torch.ones(1, len(ids)))
    return u.loc[0, :, : model.model.action.word_size].double().numpy()


def test_contributions_are_the_largest_terms_of_the_chosen_words_score(model: CausalQwenForCausalLM) -> None:
    found = why(model, Words(), PROMPT, dims=3)
    ids, values = Words().encode(PROMPT)
    action, u = model.model.action, individuals(model)[-1]
    loc, scale, _, _ = model.model(torch.tensor([ids]), torch.tensor([values], dtype=torch.float64))
    p = torch.distributions.Cauchy(loc[0, -1], scale[0, -1]).cdf(action.threshold).neg().add(1)[: NUM + 1].detach()
    assert [word.id for word in found.words] == p.topk(3).indices.tolist()
    for word in found.words:
        terms = action.cls_weight[word.id].detach().double().numpy() * u
        assert word.contributions == pytest.approx(terms[found.dims], abs=1e-6)
        assert sum(word.contributions) + word.rest + word.bias == pytest.approx(word.loc, abs=1e-9)
        assert word.loc == pytest.approx(float(loc[0, -1, word.id].detach()), abs=1e-5)
        assert word.p == pytest.approx(float(p[word.id]), abs=1e-5)
    terms = np.abs(action.cls_weight[found.words[0].id].detach().numpy() * u)
    assert found.dims == np.argsort(-terms)[:3].tolist()
    assert found.u == pytest.approx(u[found.dims], abs=1e-6)


def test_the_map_has_the_principal_components_of_the_words_dimensions(model: CausalQwenForCausalLM) -> None:
    found = why(model, Words(), PROMPT, individuals=5, seed=1)
    points = individuals(model)
    values, vectors = np.linalg.eigh(np.cov(points.T))
    assert found.shares == pytest.approx((values[-1] / values.sum(), values[-2] / values.sum()), abs=1e-6)
    for axis, name in enumerate("xy"):
        wanted = (points - points.mean(0)) @ vectors[:, -1 - axis]
        got = np.array([getattr(point, name) for point in found.tokens])
        assert min(np.abs(got - wanted).max(), np.abs(got + wanted).max()) < 1e-5
    assert len(found.tokens) == len(Words().encode(PROMPT)[0])
    assert len(found.individuals) == 5
    assert why(model, Words(), PROMPT, individuals=5, seed=1) == found
    assert why(model, Words(), PROMPT, individuals=5, seed=2).individuals != found.individuals


def test_individuals_of_a_vanishing_scale_lie_at_the_last_token(model: CausalQwenForCausalLM) -> None:
    scale = model.model.abduction.scale_net.bias
    before = scale.detach().clone()
    with torch.no_grad():
        scale.fill_(-40.0)
        found = why(model, Words(), PROMPT, individuals=2)
        scale.copy_(before)
    last = found.tokens[-1]
    assert all((point.x, point.y) == pytest.approx((last.x, last.y), abs=1e-2) for point in found.individuals)


def test_any_word_can_be_explained_and_one_that_is_none_is_refused(model: CausalQwenForCausalLM) -> None:
    assert [word.id for word in why(model, Words(), PROMPT, words=[5, 9]).words] == [5, 9]
    for wrong in ({"words": [10**6]}, {"dims": 0}, {"individuals": -1}):
        with pytest.raises(UserError):
            why(model, Words(), PROMPT, **wrong)


def test_a_number_that_is_chosen_has_no_value_yet_and_is_named_num(model: CausalQwenForCausalLM) -> None:
    threshold = model.model.action.threshold
    before = threshold.detach().clone()
    with torch.no_grad():
        threshold[NUM] = -1e4
        found = why(model, Words(), PROMPT, individuals=2)
        threshold.copy_(before)
    assert [found.words[0].text, *(point.text for point in found.individuals)] == ["<NUM>"] * 3


def test_points_on_a_line_have_one_axis_and_the_map_is_drawn() -> None:
    line = np.arange(4.0)[:, None] * np.array([[3.0, -4.0]])
    _, axes, shares = principal_axes(line)
    assert shares == pytest.approx((1.0, 0.0))
    assert axes[:, 0] == pytest.approx([-0.6, 0.8])
    assert not axes[:, 1].any()
    assert principal_axes(line[:1])[2] == (0.0, 0.0)
    drawn = map_plot("a & b", [("<x>", 0.0, 0.0), ("y", 1.0, 0.0)], [("z", 1e9, 5.0)], "note")
    assert drawn.count("<circle") == 3
    assert "&lt;x&gt;" in drawn
