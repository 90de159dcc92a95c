"""The loop: left padding, cache, ends, numbers fed back, and equality with Hugging Face where it is promised."""

import copy
import math
from typing import Any

import pytest
import torch
from support.numerics import assert_close
from support.tiny import (
    CONTEXT,
    NUM,
    TARGET,
    VOCAB,
    number_prompts,
    number_writer,
    number_writing_lm,
    random_ids,
    tiny_base,
    tiny_model,
)
from support.words import Words
from torch import Tensor

from cqwen_dist.batch import positions_in
from cqwen_dist.config import UserError
from cqwen_dist.generate.continuation import continue_text
from cqwen_dist.generate.generator import generate
from cqwen_dist.generate.modes import MODES
from cqwen_dist.generate.numbers import GeneratedNumbers
from cqwen_dist.heads.intervals import SHARES, Intervals
from cqwen_dist.model import CausalQwenForCausalLM, CausalQwenModel
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.prediction.table import predict_numbers, predict_rows
from cqwen_dist.training.evaluation.number_metrics import surest


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


BATCH = number_prompts()
PROMPT = BATCH["input_ids"].shape[1]


def law_of(model: CausalQwenModel, ids: Tensor, numbers: GeneratedNumbers) -> Cauchy:
    """U [B,T',C] float64 before each position of written texts."""
    mask = torch.nn.functional.pad(BATCH["attention_mask"], (0, ids.shape[1] - PROMPT), value=1.0).bool()
    with torch.no_grad():
        u = model.infer(ids, numbers.values, mask, position_ids=positions_in(mask))
    return Cauchy(*(part.double().roll(1, 1) for part in u))


def most(words: float, numbers: float) -> dict[str, Any]:
    """Calibration by which any share of answers has these doubts at most."""
    return Intervals(doubts={"words": [words] * len(SHARES), "numbers": [numbers] * len(SHARES)}).to_dict()


@pytest.mark.parametrize("mode", ["standard", "noise", "individual", "sample"])
def test_scales_are_split_by_their_source(model: CausalQwenModel, mode: str) -> None:
    """|W| scale_U and |W| |b_noise| of the written word, and the same of Y; what is drawn has no scale any more."""
    ids, numbers = generate(model, **BATCH, mode=mode, seed=1, max_new_tokens=12)
    u, action = law_of(model, ids, numbers), model.action
    individual = u.scale if mode in ("standard", "noise") else torch.zeros_like(u.scale)
    noise = action.b_noise.double().abs() * (mode in ("standard", "individual"))
    rows = action.cls_weight.double().abs()[ids]
    dims = rows.shape[-1]
    of_y = action.reg_weight.double().abs()
    wanted = [(rows * part[..., :dims]).sum(-1) for part in (individual, noise.expand_as(individual))]
    wanted += [(of_y * part).sum(-1) for part in (individual, noise.expand_as(individual))]
    new = numbers.p_word.isfinite()
    assert_close(numbers.parts[new], torch.stack(wanted, -1)[new], 1e-4, "parts")
    assert bool(numbers.parts[~new].isnan().all())


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_a_text_ends_before_a_doubtful_word_or_number(model: CausalQwenModel, static: bool) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, **({"cache_implementation": "static"} if static else {})}
    ids, numbers = generate(model, **BATCH, **options)
    u, action = law_of(model, ids, numbers), model.action
    loc = u.loc[..., : action.word_size] @ action.cls_weight.double().T + action.cls_bias.double()
    doubt = -loc.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    new, number = torch.arange(ids.shape[1]) >= PROMPT, numbers.generated
    of_words, of_numbers = float(doubt[:, PROMPT:].quantile(0.9)), float(numbers.scale[number].quantile(0.7))
    seen = 0
    for words, wide in ((of_words, math.inf), (math.inf, of_numbers), (of_words, of_numbers)):
        model.config.calibration = most(words, wide)
        found, its = generate(model, **BATCH, **options, abstain=0.5)
        doubtful = new & ((doubt > words) | (number & (numbers.scale > wide)))
        for row, (own, at) in enumerate(zip(found, doubtful.int().argmax(1).tolist(), strict=True)):
            end = at if bool(doubtful[row].any()) else len(ids[row]) - 1
            written = min(end + 1, len(own))
            assert torch.equal(own[:written], ids[row, :written])
            assert its.abstained[row].nonzero()[:, 0].tolist() == ([at] if bool(doubtful[row].any()) else [])
            assert bool(its.p_word[row, written:].isnan().all()), "nothing comes after it"
            seen += int(its.abstained[row].sum())
    assert seen > 2
    model.config.calibration = None


def test_texts_streams_and_tables_leave_the_doubtful_out() -> None:
    lm: CausalQwenForCausalLM = number_writing_lm()
    prompts = ["w3 w8 99.9 w41 w7"]
    (whole,) = continue_text(lm, Words(), prompts, max_new_tokens=10)
    with pytest.raises(UserError, match=r"abstain: found 0.5, allowed: nothing: no held-out texts"):
        continue_text(lm, Words(), prompts, abstain=0.5)
    with pytest.raises(UserError, match=r"abstain: found 1, allowed: a share of answers"):
        continue_text(lm, Words(), prompts, abstain=1)
    lm.config.calibration = most(math.inf, 0.0)  # each number is too wide
    pieces: list[str] = []
    (ended,) = continue_text(lm, Words(), prompts, max_new_tokens=10, abstain=0.5, on_text=pieces.append)
    first = next(i for i, token in enumerate(whole.tokens) if token.id == NUM)
    assert ended.end == "abstain"
    assert ended.tokens == whole.tokens[:first]
    assert "".join(pieces) == ended.text
    assert ended.numbers == []
    for token in whole.tokens:
        assert token.individual > 0 < token.noise

    # A table's value is left out, its intervals stay; a number that was asked for needs no likely <NUM>
    rows = [{"a": "1"}]
    (plain,) = predict_numbers(lm, Words(), prompts, within=0)
    (doubtful,) = predict_rows(lm, Words(), rows, prompts, within=0, abstain=0.5)
    assert doubtful == {"a": "1", **plain, "predicted": None}
    lm.config.calibration = most(0.0, math.inf)
    assert next(predict_rows(lm, Words(), rows, prompts, within=0, abstain=0.5)) == {"a": "1", **plain}


def test_the_surest_answers_have_these_risks() -> None:
    draw = torch.Generator().manual_seed(0)
    doubt, error = torch.rand(2, 103, generator=draw, dtype=torch.float64).numpy()
    levels, risks = surest(doubt, error, lambda part: float(part.mean()))
    for share, level, risk in zip(SHARES, levels, risks, strict=True):
        answered = doubt <= level
        assert answered.sum() == round(share * 103)
        assert risk == pytest.approx(error[answered].mean(), abs=1e-12)
    known = Intervals(doubts={"words": levels})
    assert known.most_doubt("words", 0.8) == levels[15]
    assert levels[14] < known.most_doubt("words", 0.78) < levels[15]
    assert known.most_doubt("numbers", 0.8) == math.inf
    assert Intervals.from_dict(known.to_dict()) == known
    with pytest.raises(ValueError, match="20 doubts"):
        Intervals.from_dict({**known.to_dict(), "doubts": {"words": [1.0]}})
