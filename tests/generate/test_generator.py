"""The loop: left padding, cache, ends, numbers fed back, and equality with Hugging Face where it is promised."""

import copy
from typing import Any

import pytest
import torch
from support.numerics import assert_close
from support.tiny import CONTEXT, NUM, TARGET, VOCAB, number_prompts, number_writer, random_ids, tiny_base, tiny_model
from torch import Tensor

from cqwen_dist.config import UserError
from cqwen_dist.generate.generator import generate
from cqwen_dist.generate.modes import MODES
from cqwen_dist.generate.numbers import GeneratedNumbers
from cqwen_dist.model import CausalQwenModel


@pytest.fixture(scope="module")
def model() -> CausalQwenModel:
    return number_writer()


@pytest.fixture(scope="module")
def prompts() -> tuple[Tensor, Tensor, Tensor]:
    """ids, values, mask [3,8]."""
    ids, values, mask = number_prompts().values()
    return ids, values, mask


def run(model: CausalQwenModel, prompts: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, GeneratedNumbers]:
    ids, values, mask = prompts
    return generate(model, ids, values, attention_mask=mask, **{"max_new_tokens": 12, **options})


@pytest.mark.parametrize(
    ("mode", "use_cache", "left_out"),
    [("standard", True, []), ("standard", False, [2, 5]), ("compatible", True, [2, 5])],
)
def test_left_padded_batch_equals_single_runs(model, prompts, mode: str, use_cache: bool, left_out: list[int]) -> None:
    ids, values, mask = prompts
    mask = mask.clone()
    mask[0, left_out] = 0  # between other tokens
    batch, numbers = run(model, (ids, values, mask), mode=mode, use_cache=use_cache)
    assert batch.shape == (3, 20)
    for row in range(3):
        real = mask[row].bool()
        alone, own = generate(
            model, ids[row : row + 1, real], values[row : row + 1, real], mode=mode, max_new_tokens=12
        )
        assert torch.equal(batch[row, 8:], alone[0, int(real.sum()) :])
        assert_close(numbers.values[row, 8:], own.values[0, int(real.sum()) :], 1e-5, "values")
    if mode == "standard":
        assert bool(numbers.generated.any())
        assert not bool(numbers.generated[:, 8:].all())


@pytest.mark.parametrize("mode", MODES)
def test_cached_equals_uncached_and_a_seed_repeats(model, prompts, mode: str) -> None:
    a, x = run(model, prompts, mode=mode, seed=3, do_sample=True)
    b, y = run(model, prompts, mode=mode, seed=3, do_sample=True, use_cache=False)
    c, _ = run(model, prompts, mode=mode, generator=torch.Generator().manual_seed(3), do_sample=True)
    assert torch.equal(a, b)
    assert torch.equal(a, c)
    assert_close(x.values, y.values, 1e-3, "values")
    torch.manual_seed(3)
    d, _ = run(model, prompts, mode=mode, do_sample=True)
    assert torch.equal(a, d)  # torch's global state is the default
    others = [run(model, prompts, mode=mode, seed=s, do_sample=True)[0] for s in range(4, 8)]
    assert (mode == "standard") == all(torch.equal(a, other) for other in others)


def test_every_step_equals_a_decision_on_the_text_so_far(model, prompts) -> None:
    """The whole result fed at once: each new word is argmax P there, each number loc_Y in the raw unit, fed back."""
    ids, numbers = run(model, prompts)
    mask = torch.cat([prompts[2].bool(), torch.ones(3, 12, dtype=torch.bool)], 1)
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        u = model.action.add_noise(model.infer(ids, numbers.values, mask, position_ids=positions))
        p = model.action.scores(u).sf(model.action.threshold)[..., : NUM + 1]
        y = model.action.number_head.value(u)
    assert torch.equal(p[:, 7:-1].argmax(-1), ids[:, 8:])
    new = numbers.generated[:, 8:]
    assert bool(new.any())
    assert torch.equal(new, ids[:, 8:] == NUM)
    assert_close(numbers.values[:, 8:][new], (y.loc[:, 7:-1][new].double() * 40 + 150), 1e-5, "raw value")
    assert_close(numbers.scale[:, 8:][new], y.scale[:, 7:-1][new], 1e-5, "scale_Y")
    assert_close(numbers.p_num[:, 8:], p[:, 7:-1, NUM], 1e-4, "P_NUM")
    assert_close(numbers.p_word[:, 8:], p[:, 7:-1].amax(-1), 1e-4, "P of the word")
    assert bool(numbers.p_word[:, :8].isnan().all())
    assert numbers.values.dtype == torch.float64
    assert not numbers.values[ids != NUM].any()
    assert torch.equal(numbers.values[:, :8], prompts[1])
    assert not numbers.generated[:, :8].any()


def test_a_row_ends_at_eos_and_is_padded(model, prompts) -> None:
    free, _ = run(model, prompts)
    eos = int(free[0, 10])
    ids, numbers = run(model, prompts, eos_token_id=[eos, VOCAB + 5], pad_token_id=9)
    for row in range(3):
        new, plain = ids[row, 8:].tolist(), free[row, 8:].tolist()
        stop = plain.index(eos) + 1 if eos in plain else len(plain)
        assert new[:stop] == plain[:stop]
        assert new[stop:] == [9] * (len(new) - stop)
        assert not numbers.generated[row, 8 + stop :].any()
        assert not numbers.values[row, 8 + stop :].any()
    alone, _ = generate(model, prompts[0][:1], prompts[1][:1], max_new_tokens=12, eos_token_id=eos)
    assert alone.shape[1] == 8 + free[0, 8:].tolist().index(eos) + 1  # stops when every row has ended


def test_the_base_s_own_eos_is_the_default() -> None:
    base = tiny_base(eos_token_id=list(range(VOCAB)), pad_token_id=4)
    model = CausalQwenModel.from_base_model(base, start="seed", num_token_id=NUM).eval()
    assert generate(model, random_ids(2, 3))[0].shape == (2, 4)
    assert generate(model, random_ids(2, 3), eos_token_id=[], max_new_tokens=5)[0].shape == (2, 8)


def test_spare_rows_are_written_only_in_mode_compatible(model) -> None:
    spare = copy.deepcopy(model)
    with torch.no_grad():
        spare.action.cls_bias[NUM + 3] = 1e4  # a spare row that would always win
    ids = random_ids(2, 4)
    for mode in MODES:
        new = generate(spare, ids, mode=mode, max_new_tokens=4, seed=0)[0][:, 4:]
        assert bool((new == NUM + 3).all()) == (mode == "compatible"), mode
    assert bool((generate(spare, ids, max_new_tokens=2, used_rows=VOCAB)[0][:, 4:] == NUM + 3).all())


def test_the_context_ends_a_generation(model) -> None:
    ids, numbers = generate(model, random_ids(1, CONTEXT - 2), max_new_tokens=50)
    assert ids.shape == numbers.values.shape == (1, CONTEXT)
    full, _ = generate(model, random_ids(1, CONTEXT), max_new_tokens=50)
    assert full.shape == (1, CONTEXT)
    assert generate(model, random_ids(1, 4), max_new_tokens=0)[0].shape == (1, 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", ["at the floor", "huge"])
def test_extreme_scales_are_defined(mode: str, scale: str, prompts) -> None:
    net = tiny_model(target=TARGET)
    with torch.no_grad():
        if scale == "at the floor":
            net.action.b_noise.zero_()
            net.abduction.scale_net.bias.fill_(-200.0)
        else:
            net.action.b_noise.fill_(1e6)
            net.abduction.scale_net.bias.fill_(1e6)
        net.action.threshold[NUM] = -50.0
    ids, numbers = run(net, prompts, mode=mode, seed=1, do_sample=True)
    assert bool(numbers.values.isfinite().all())
    limit = VOCAB if mode == "compatible" else NUM + 1
    assert bool((ids < limit).all())


def test_wrong_options_are_user_errors(model) -> None:
    ids = random_ids(2, 4)
    ones = torch.ones_like(ids)
    right = ones.clone()
    right[0, -1] = 0
    nan = torch.full((2, 4), float("nan"))
    cases = [
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "prompt: found no tokens"),
        ({"input_ids": random_ids(1, CONTEXT + 1)}, f"prompt: found '{CONTEXT + 1} tokens', allowed: at most"),
        ({"input_ids": ids + VOCAB}, r"prompt: .*ids in \[0, 101\)"),
        ({"numeric_values": nan}, "numeric_values: found nan"),
        ({"attention_mask": right}, "attention_mask: .*on the left"),
        ({"mode": "greedy"}, "mode: found 'greedy', allowed: standard"),
        ({"temperature": 0.5}, "temperature: found 0.5, allowed: none in mode standard"),
        ({"seed": 1, "generator": torch.Generator()}, "seed"),
    ]
    for options, message in cases:
        with pytest.raises(UserError, match=message):
            generate(model, **{"input_ids": ids, **options})
    part = tiny_model(vocab_start=20, rows=40)
    with pytest.raises(ValueError, match="gather it first"):
        generate(part, ids)
