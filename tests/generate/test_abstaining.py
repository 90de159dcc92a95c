"""A text ends before a word or number that is too doubtful; what the scales consist of. Against float64 sums."""

import math
from typing import Any

import pytest
import torch
from support.numerics import assert_close
from support.tiny import NUM, number_prompts, number_writer, number_writing_lm
from support.words import Words
from torch import Tensor

from cqwen_dist.batch import positions_in
from cqwen_dist.config import UserError
from cqwen_dist.generate.continuation import continue_text
from cqwen_dist.generate.generator import generate
from cqwen_dist.generate.numbers import GeneratedNumbers
from cqwen_dist.heads.intervals import SHARES, Intervals
from cqwen_dist.model import CausalQwenForCausalLM, CausalQwenModel
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.prediction.table import predict_numbers, predict_rows
from cqwen_dist.training.evaluation.abstaining import surest

BATCH = number_prompts()
PROMPT = BATCH["input_ids"].shape[1]


@pytest.fixture(scope="module")
def model() -> CausalQwenModel:
    return number_writer()


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
    with pytest.raises(UserError, match="abstain"):
        lm.generate(torch.tensor([[3, 8]]), num_beams=2, mode="compatible", abstain=0.5)

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
