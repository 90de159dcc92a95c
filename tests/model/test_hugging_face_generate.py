"""`generate` as Hugging Face users call it: generation configs, processors, criteria, streamers, copies."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import NUM, random_ids, tiny_base, tiny_causal_lm
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from cqwen_dist.config import UserError
from cqwen_dist.generate.generator import generate as low_level
from cqwen_dist.model import CausalQwenForCausalLM, CausalQwenModel


def pair_of(kind: str = "qwen2", tied: bool = False) -> tuple[PreTrainedModel, CausalQwenForCausalLM]:
    """A base and the same base turned causal, which reads generated numbers as the base would (w_num is 0)."""
    base = tiny_base(kind, tied=tied, eos_token_id=17, pad_token_id=3)
    model = CausalQwenModel.from_base_model(copy.deepcopy(base), start="seed", num_token_id=NUM, w_num_scale=0.0)
    return base, CausalQwenForCausalLM(model.config, model).eval()


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, CausalQwenForCausalLM]:
    return pair_of()


@pytest.fixture(scope="module")
def prompts() -> tuple[Tensor, Tensor]:
    """ids, mask [4,7], padded on the left."""
    ids = random_ids(4, 7)
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[2, :6] = 0
    return ids.masked_fill(mask == 0, 3), mask


@pytest.mark.parametrize(
    ("kind", "tied", "options"),
    [
        ("qwen2", True, {"do_sample": False, "repetition_penalty": 1.3}),
        ("qwen2", False, {"do_sample": False, "no_repeat_ngram_size": 1, "min_new_tokens": 6}),
        ("llama", True, {"do_sample": True, "top_k": 9, "top_p": 0.9, "temperature": 1.7}),
        ("qwen3", False, {"do_sample": True, "top_k": 0, "typical_p": 0.8, "num_return_sequences": 3}),
        ("mistral", False, {"do_sample": False, "max_length": 15}),
    ],
)
def test_compatible_generates_what_the_base_generates(prompts, kind: str, tied: bool, options: dict[str, Any]) -> None:
    """Token for token, also where a <NUM> goes back in."""
    base, model = pair_of(kind, tied)
    ids, mask = prompts
    options = {"max_new_tokens": 12, **options} if "max_length" not in options else options
    torch.manual_seed(5)
    expected = base.generate(ids, attention_mask=mask, **options)
    torch.manual_seed(5)
    found = model.generate(ids, attention_mask=mask, mode="compatible", **options)
    assert torch.equal(found, expected)


def test_without_a_mask_padding_is_inferred_as_in_transformers(pair, prompts) -> None:
    base, model = pair
    ids, mask = prompts
    ids = ids.masked_fill(ids == 3, 4).masked_fill(mask == 0, 3)
    given = {"pad_token_id": 3, "eos_token_id": 17, "max_new_tokens": 8}
    expected = base.generate(ids, do_sample=False, **given)
    assert torch.equal(model.generate(ids, mode="compatible", do_sample=False, **given), expected)
    given |= {"num_return_sequences": 2, "seed": 1, "mode": "causal"}
    assert torch.equal(model.generate(ids, **given), model.generate(ids, attention_mask=mask, **given))
    with pytest.raises(UserError, match="padding at the end'"):
        model.generate(ids.flip(1), **given)


def test_the_generation_config_is_the_default_and_is_saved(pair, prompts, tmp_path: Path) -> None:
    """Sampling settings of an instruct base are meant for softmax; the other modes take lengths and ends of it."""
    base, model = pair
    ids, mask = prompts
    model = copy.deepcopy(model)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_k=20,
        repetition_penalty=1.1,
        eos_token_id=17,
        pad_token_id=3,
        mode="causal",
    )
    model.save_pretrained(tmp_path)
    again = CausalQwenForCausalLM.from_pretrained(tmp_path).eval()
    theirs = copy.deepcopy(base)
    theirs.generation_config = copy.deepcopy(again.generation_config)
    torch.manual_seed(2)
    expected = theirs.generate(ids, attention_mask=mask, max_new_tokens=10)
    torch.manual_seed(2)
    assert torch.equal(again.generate(ids, attention_mask=mask, mode="compatible", max_new_tokens=10), expected)
    plain = low_level(model.model, ids, attention_mask=mask, mode="causal", seed=3, max_new_tokens=10)[0]
    assert torch.equal(again.generate(ids, attention_mask=mask, seed=3, max_new_tokens=10), plain)
    copied = copy.deepcopy(again.generation_config)  # what `transformers serve` does for each request
    copied.update(max_new_tokens=10, output_attentions=False, output_hidden_states=False)
    assert torch.equal(again.generate(ids, attention_mask=mask, seed=3, generation_config=copied), plain)


def test_length_options_copies_and_outputs() -> None:
    model = tiny_causal_lm()
    ids = random_ids(2, 5)
    assert model.generate(ids).shape == (2, 5 + 59)  # 64 by default, the context is 64
    assert model.generate(ids, max_length=9).shape == (2, 9)
    assert model.generate(ids, max_length=3).shape == (2, 5)
    assert model.generate(inputs=ids, max_new_tokens=2).shape == (2, 7)
    for mode in ("standard", "compatible"):
        assert model.generate(ids, mode=mode, eos_token_id=[], max_new_tokens=2).shape == (2, 7)
    out = model.generate(
        ids, max_new_tokens=3, num_return_sequences=3, mode="causal", seed=1, return_dict_in_generate=True
    )
    assert out.sequences.shape == out.numbers.values.shape == (6, 8)
    assert torch.equal(out.sequences[:3, :5], ids[:1].expand(3, -1))
    assert model.generate(ids, max_new_tokens=3, max_time=0.0).shape == (2, 6)  # it ends after the step it is in


def test_mode_ovr_takes_top_k_top_p_and_temperature() -> None:
    """One word is left by top_k 1, a small top_p or temperature 0: the best by P. Else a warmer draw differs."""
    model, ids = tiny_causal_lm(), random_ids(2, 5)
    with torch.no_grad():
        model.model.action.threshold.fill_(3.0)

    def written(**options: Any) -> list[list[int]]:
        return model.generate(ids, mode="ovr", seed=3, max_new_tokens=8, **options).tolist()

    best = model.generate(ids, max_new_tokens=8).tolist()
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 0.0}, {"temperature": 1e-3}):
        assert written(**options) == best, options
    assert written() != best
    assert written(temperature=1.0) == written(top_k=0) == written(top_p=1.0) == written(), "no default is left"
    assert written(temperature=0.2) != written()
    static = {"cache_implementation": "static", "disable_compile": True}
    assert written(temperature=0.5, top_k=20, **static) == written(temperature=0.5, top_k=20)


def test_sampling_settings_without_a_mode_draw_from_softmax() -> None:
    """As scripts for other models write them, and as `serve` reads them."""
    model, ids = tiny_causal_lm(), random_ids(2, 5)

    def written(**options: Any) -> list[list[int]]:
        return model.generate(ids, **{"max_new_tokens": 8, "seed": 3, **options}).tolist()

    greedy = written()
    for drawn in (
        {"do_sample": True},
        {"temperature": 0.7},
        {"top_k": 3},
        {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0},
    ):
        found = written(**drawn)
        assert found == written(mode="compatible", do_sample=True, **{k: v for k, v in drawn.items() if k[0] == "t"})
        assert found != greedy, drawn
        assert written(generation_config=GenerationConfig(**drawn)) == found, f"{drawn} in a GenerationConfig"
    for neutral in (
        {"do_sample": False},
        {"do_sample": False, "temperature": 0.7, "top_p": 0.9, "top_k": 50},
        {"do_sample": True, "temperature": 0.0},
        {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
    ):
        assert written(**neutral) == greedy, neutral
    model.generation_config = GenerationConfig(mode="causal")
    assert written(temperature=0.5) == written(mode="causal", temperature=0.5), "the mode of the model stays"


def test_unsupported_generate_options_are_refused() -> None:
    model, ids = tiny_causal_lm(), random_ids(1, 3)
    for options, match in (
        ({"num_beams": 4, "mode": "compatible"}, "num_beams: found 4, allowed: 1; there are no beams"),
        ({"output_scores": True}, "output_scores: found True, allowed: False; model"),
        ({"repetition_penalty": 1.3}, r"repetition_penalty: found 1.3, allowed: nothing but in mode compatible or ovr"),
        ({"penalty_alpha": 0.6}, r"penalty_alpha: found 0\.6, allowed: None; mode='compatible' takes"),
        ({"colour": "red"}, "colour: found 'red', allowed: an option of this generate"),
        ({"max_new_token": 3}, "max_new_token: found 3, allowed: .*the nearest is max_new_tokens"),
        ({"mode": "ovr", "top_p": 1.5}, r"top_p: found 1\.5"),
        ({"mode": "ovr", "temperature": -1.0}, r"temperature: found -1\.0"),
        ({"mode": "standard", "do_sample": True}, "allowed: False, as mode standard draws nothing; mode='compatible'"),
        ({"mode": "standard", "temperature": 0.7}, r"temperature: found 0\.7, allowed: none in mode standard"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens: found 2\.5, allowed: a whole number"),
        ({"mode": "causal", "seed": "one"}, "seed: found 'one', allowed: a whole number"),
    ):
        with pytest.raises(UserError, match=match):
            model.generate(ids, **options)
    with pytest.raises(UserError, match="prompt"):
        model.generate()


class Ends(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([input_ids.shape[1] >= 6, False])


class Told(BaseStreamer):
    def __init__(self) -> None:
        self.put_: list[list] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.put_.append(value.tolist())

    def end(self) -> None:
        self.ended = True


def test_stopping_criteria_and_streamers() -> None:
    model, ids = tiny_causal_lm(), random_ids(2, 4)
    told = Told()
    found = model.generate(
        ids, max_new_tokens=5, pad_token_id=9, stopping_criteria=StoppingCriteriaList([Ends()]), streamer=told
    )
    plain = model.generate(ids, max_new_tokens=5)
    assert found[0].tolist() == [*plain[0, :6].tolist(), 9, 9, 9]
    assert torch.equal(found[1], plain[1])
    assert told.put_[0] == ids.tolist()
    assert told.put_[1:] == found[:, 4:].T.tolist()
    assert told.ended
