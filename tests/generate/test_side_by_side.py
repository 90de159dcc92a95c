"""One prompt under many individuals or noises: who is who, and how different."""

import pytest
import torch
from support.tiny import NUM, number_writing_lm
from support.words import Words

from cqwen_dist.generate.continuation import Diversity, counterfactuals
from cqwen_dist.model import CausalQwenForCausalLM
from cqwen_dist.ops.cauchy import Cauchy

PROMPT = "w3 w8 99.9 w41"


@pytest.fixture(scope="module")
def model() -> CausalQwenForCausalLM:
    lm = number_writing_lm()
    with torch.no_grad():
        lm.model.action.b_noise.fill_(0.05)
    return lm


@pytest.mark.parametrize("mode", ["individual", "noise"])
def test_diversity_rises_with_temperature(model: CausalQwenForCausalLM, mode: str) -> None:
    """At 0 everybody is the median individual: one text, which in mode individual is what U's location says."""
    texts = {}
    for heat in (0.0, 1.0, 20.0):
        found = counterfactuals(model, Words(), PROMPT, 8, mode, seed=2, temperature=heat, max_new_tokens=8)
        assert len(found) == 8
        texts[heat] = Diversity.of([w.text for w in found])
    assert (texts[0.0].distinct, texts[0.0].distance) == (1, 0.0)
    assert texts[20.0].distinct == 8
    assert texts[0.0].distance < texts[1.0].distance < texts[20.0].distance
    again = counterfactuals(model, Words(), PROMPT, 8, mode, seed=1, max_new_tokens=8)
    assert [w.text for w in again] == [
        w.text for w in counterfactuals(model, Words(), PROMPT, 8, mode, seed=1, max_new_tokens=8)
    ]


@pytest.mark.parametrize("mode", ["individual", "noise"])
def test_the_same_individuals_answer_every_prompt(model: CausalQwenForCausalLM, mode: str) -> None:
    """Y(t), S3 1: equal treatments have equal answers, and the number is that of eps in each treatment's law."""
    prompts, count = [PROMPT, "w60 w2", PROMPT], 6
    found = [counterfactuals(model, Words(), text, count, mode, seed=5, max_new_tokens=8) for text in prompts]
    texts = [[written.text for written in of] for of in found]
    assert texts[0] == texts[2] != texts[1]
    assert len(set(texts[0])) > 1
    net, seed = model.model, 5
    eps = torch.rand(count, net.config.causal_hidden_size, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        net.action.threshold[NUM] = -1e4  # a number comes at once
    try:
        for prompt in prompts[:2]:
            told = counterfactuals(model, Words(), prompt, count, mode, seed=seed, max_new_tokens=1)
            ids, values = Words().encode(prompt)
            with torch.no_grad():
                u = net.infer(torch.tensor([ids]), torch.tensor([values], dtype=torch.float64))
                law = Cauchy(u.loc[0, -1], u.scale[0, -1])
                noise = Cauchy(torch.zeros_like(law.loc), net.action.b_noise.abs())
                at = law.sample(eps) if mode == "individual" else law.loc + noise.sample(eps)
                wanted = net.target.inverse((at @ net.action.reg_weight + net.action.reg_bias).double())
            assert [individual.numbers[0].value for individual in told] == pytest.approx(wanted.tolist(), rel=1e-3)
    finally:
        with torch.no_grad():
            net.action.threshold[NUM] = -0.5


def test_diversity_is_computed_from_words() -> None:
    assert Diversity.of(["a b", "a b"]) == Diversity(2, 1, 0.0)
    assert Diversity.of(["a b", "c d"]) == Diversity(2, 2, 1.0)
    assert Diversity.of(["a b", "b c", "a b"]).distance == pytest.approx((2 / 3 + 0 + 2 / 3) / 3)
    assert Diversity.of(["a"]) == Diversity(1, 1, 0.0)
