"""How U decides: contributions that add up to the score, against numpy."""

import numpy as np
import pytest
import torch
from support.tiny import NUM, tiny_causal_lm
from support.words import Words

from cqwen_dist.model import CausalQwenForCausalLM
from cqwen_dist.tools.report.why import why

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


def test_the_path_of_u_has_each_step_in_medians(model: CausalQwenForCausalLM) -> None:
    path = why(model, Words(), PROMPT).path
    steps = np.linalg.norm(np.diff(individuals(model), axis=0), axis=1)
    assert [token for token, _ in path] == [" w8", " 99.9", " w41", " w7"]
    assert [step for _, step in path] == pytest.approx(steps / np.sort(steps)[1], rel=1e-5)
    assert why(model, Words(), "w3").path == []


def test_drawn_individuals_depend_on_the_seed_alone(model: CausalQwenForCausalLM) -> None:
    found = why(model, Words(), PROMPT, individuals=9, seed=1)
    assert why(model, Words(), PROMPT, individuals=9, seed=1) == found
    assert len(found.individuals) == 9
    assert why(model, Words(), PROMPT, individuals=9, seed=2).individuals != found.individuals
