"""Words and numbers at temperatures and in modes of their own, against a replay of every step."""

import copy
from typing import Any

import pytest
import torch
from support.numerics import assert_close
from support.tiny import NUM, number_prompts, number_writer, random_ids
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper

from cqwen_dist.config import UserError
from cqwen_dist.generate.generator import generate
from cqwen_dist.generate.modes import MODES, find_mode, mode_names
from cqwen_dist.heads.intervals import WORD_TAILS, Intervals
from cqwen_dist.model import CausalQwenForCausalLM, CausalQwenModel
from cqwen_dist.ops.cauchy import Cauchy

STEPS = 12
MIXED = {"words": "compatible", "numbers": "individual"}


@pytest.fixture(scope="module")
def model() -> CausalQwenModel:
    net = number_writer()
    net.config.calibration = Intervals(word_temperature=30.0).to_dict()
    return net


def drawn(law: Cauchy, name: str, eps: Tensor, noise: Tensor, factor: float, cut: float = 0.0) -> Cauchy:
    """U' of a mode, float64."""
    tangent = torch.tan(torch.pi * (eps.clamp(max(cut, 1e-7), 1 - max(cut, 1e-7)) - 0.5)) * factor
    if name == "noise":
        return Cauchy(law.loc + noise * tangent, law.scale)
    return Cauchy(law.loc + law.scale * tangent, noise * (name != "sample"))


def replayed(net: CausalQwenModel, mode: Any, given: dict[str, Any], ids: Tensor, values: Tensor) -> tuple[Any, Any]:
    """(words [B,steps], loc_Y of a number at every step, raw unit), each decided on the text so far."""
    words, numbers = (mode, mode) if isinstance(mode, str) else (mode["words"], mode["numbers"])
    action, mask = copy.deepcopy(net.action).double(), torch.cat([given["attention_mask"], torch.ones(3, STEPS)], 1)
    draw, kept = torch.Generator().manual_seed(3), {}

    def eps_of(kind: str, name: str) -> Tensor:
        if kind not in kept or name not in ("individual", "noise"):
            kept[kind] = torch.rand(3, action.b_noise.numel(), generator=draw)
        return kept[kind].double()

    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        every = net.infer(ids, values, mask, position_ids=positions)
        noise, found, locs = action.b_noise.abs(), [], []
        for t in range(7, 7 + STEPS):
            u = Cauchy(every.loc[:, t].double(), every.scale[:, t].double())
            of_words = of_numbers = Cauchy(u.loc, u.scale + noise)
            eps = eps_of("numbers", numbers) if MODES[numbers].drawn else None
            if eps is not None:
                of_numbers = drawn(u, numbers, eps, noise, 1.0)
            if MODES[words].drawn:
                eps = eps if words == numbers else eps_of("words", words)
                of_words = drawn(u, words, eps, noise, 30.0, WORD_TAILS)
            s = action.scores(of_words)
            if words == "compatible":
                clocks = torch.empty(3, len(action.cls_bias)).exponential_(generator=draw)
                found.append((s.loc.float().softmax(1) / clocks).argmax(1))
            else:
                used = s.loc if MODES[words].rank_by == "loc" else s.sf(action.threshold)
                found.append(used[:, : NUM + 1].argmax(1))
            locs.append(net.target.inverse(action.number_head.value(of_numbers).loc.double()))
    return torch.stack(found, 1), torch.stack(locs, 1)


@pytest.mark.parametrize(
    "mode",
    [
        *("individual", "causal", "noise", "sample"),
        MIXED,
        {"words": "standard", "numbers": "causal"},
        {"words": "individual", "numbers": "standard"},
        {"words": "causal", "numbers": "noise"},
    ],
    ids=str,
)
def test_every_step_equals_a_replay(model, mode: Any) -> None:
    """Words read one individual at 30 times its scale, with the tails cut; numbers the same one at its own scale."""
    given = number_prompts()
    ids, numbers = generate(model, **given, mode=mode, seed=3, do_sample=True, max_new_tokens=STEPS)
    words, locs = replayed(model, mode, given, ids, numbers.values)
    assert torch.equal(ids[:, 8:], words)
    new = numbers.generated[:, 8:]
    assert bool(new.any())
    assert_close(numbers.values[:, 8:][new], locs[new], 1e-3, "raw value")


def test_the_word_temperature_moves_no_number(model) -> None:
    """The first number of an individual is bit for bit the same at any word temperature, and with words of softmax."""
    given = {**number_prompts(), "seed": 3, "number_first": True, "max_new_tokens": 1}
    numbers = [
        generate(model, **given, mode=mode, **options)[1].values[:, 8]
        for mode, options in (("individual", {}), ("individual", {"word_temperature": 1.0}), (MIXED, {}))
    ]
    assert torch.equal(numbers[0], numbers[1])
    assert torch.equal(numbers[0], numbers[2])
    still = generate(model, **number_prompts(), mode="individual", seed=3, temperature=0.0)
    assert torch.equal(still[0], generate(model, **number_prompts())[0]), "auto is times the temperature"
    old = copy.deepcopy(model)
    old.config.calibration = None
    before, same = (generate(old, **number_prompts(), mode="causal", seed=3, word_temperature=w) for w in ("auto", 1.0))
    assert torch.equal(before[0], same[0]), "a model without the figure draws as inferred"


def test_names_of_two_modes_are_read_and_wrong_ones_refused() -> None:
    assert mode_names("words=compatible,numbers=individual") == mode_names(MIXED) == ("compatible", "individual")
    for same in ("ovr", "individual"):
        assert mode_names({"words": same, "numbers": same}) == (same, None)
    assert find_mode({"words": "ovr", "numbers": "standard"}) is MODES["ovr"]
    for mode, said in (
        ({"words": "standard", "numbers": "compatible"}, "mode: numbers: found 'compatible', .*draws words only"),
        ({"words": "causal"}, "a mode of words and one of numbers: words="),
        ("words=causal,number=noise", "a mode of words and one of numbers: words="),
        ({"words": "greedy", "numbers": "standard"}, "mode: found 'greedy', allowed: standard"),
    ):
        with pytest.raises(UserError, match=said):
            find_mode(mode)


def test_in_hugging_face_each_kind_has_its_temperature(model) -> None:
    lm, ids = CausalQwenForCausalLM(model.config, model), random_ids(3, 8)
    options = {"seed": 3, "max_new_tokens": STEPS, "temperature": 0.5}
    found, numbers = lm.generate(ids, mode=MIXED, word_temperature=0.7, return_numbers=True, **options)
    warped = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    wanted, others = generate(model, ids, mode=MIXED, do_sample=True, logits_processor=warped, **options)
    assert torch.equal(found, wanted)
    assert torch.equal(numbers.values, others.values)
    config = GenerationConfig(mode="words=compatible,numbers=individual")
    assert torch.equal(lm.generate(ids, generation_config=config, word_temperature=0.7, **options), wanted)
    for further, said in (
        ({"mode": "standard", "word_temperature": 9.0}, "word_temperature: found 9.0, allowed: auto, or a mode out of"),
        ({"mode": "individual", "word_temperature": "wide"}, "word_temperature: found 'wide', allowed: a number >= 0"),
    ):
        with pytest.raises(UserError, match=said):
            lm.generate(ids, max_new_tokens=2, **further)
