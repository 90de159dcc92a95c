"""Beams, scores, caches and embeddings through transformers' loops: words and values against plain forward passes."""

from typing import Any

import pytest
import torch
from support.exported import tiny_pair
from torch import Tensor

from cqwen_dist.generate.numbers import POWERS, written_values
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.heads.number_head import Decision
from cqwen_dist.model import CausalQwenForCausalLM
from cqwen_dist.ops.cauchy import Cauchy

T = 6
OPTIONS: dict[str, Any] = {"eos_token_id": [], "max_new_tokens": 8, "return_numbers": True}


def writer(**shape: Any) -> CausalQwenForCausalLM:
    """A tiny model that writes words and numbers in turn in both modes, and reads numbers strongly."""
    model, _ = tiny_pair(**shape)
    num = model.config.num_token_id
    with torch.no_grad():
        model.model.features.embedding.w_num.mul_(20)
        model.model.action.cls_bias[num] += 2.7
        model.model.action.threshold[num] = 1.8
    return model


@pytest.fixture(scope="module")
def model() -> CausalQwenForCausalLM:
    return writer()


@pytest.fixture(scope="module")
def prompts(model) -> tuple[Tensor, Tensor, Tensor]:
    """ids, values, mask [2,6]: the second is shorter, each has a number."""
    ids = torch.randint(1, 260, (2, T), generator=torch.Generator().manual_seed(7))
    values = torch.zeros(2, T, dtype=torch.float64)
    ids[:, 3], values[:, 3] = model.config.num_token_id, torch.tensor([3.5, 12000.0])
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return ids, values, mask


def words_and_values(model, ids: Tensor, values: Tensor, mask: Tensor, digits: Any = None) -> tuple[Tensor, Tensor]:
    """log softmax(loc_S) [B,t,V] and the value of a number behind each position [B,t], by one plain forward pass."""
    mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(ids, values, mask, position_ids=positions, mode="compatible")
    y = Cauchy(out.loc_Y, out.scale_Y)
    values = written_values(Decision(y), model.model.target, Intervals(), digits, POWERS)
    return out.logits.log_softmax(-1), values


def assert_reads_its_own_numbers(model, ids: Tensor, values: Tensor, mask: Tensor, digits: Any = None) -> None:
    """Each written number has the value that the text before it gives, and is among the values that are fed back."""
    number = ids[:, T:] == model.config.num_token_id
    assert 2 <= int(number.sum()) < number.numel(), "a text of words and numbers"
    _, following = words_and_values(model, ids, values, mask, digits)
    wanted = following[:, T - 1 : -1].where(number, 0.0)
    torch.testing.assert_close(values[:, T:], wanted, rtol=1e-4, atol=1e-3)


def by_hand(model, ids: Tensor, values: Tensor, mask: Tensor, beams: int, steps: int) -> list[tuple[float, list, list]]:
    """Beam search of one prompt [1,T] without a cache: (mean log-probability, ids, values), the best first."""
    found = [(0.0, ids[0].tolist(), values[0].tolist())]
    for _ in range(steps):
        rows = torch.tensor([row for _, row, _ in found])
        given = torch.tensor([v for _, _, v in found], dtype=torch.float64)
        log_p, following = words_and_values(model, rows, given, mask.expand(len(rows), -1))
        further = []
        for i, (score, row, v) in enumerate(found):
            for p, word in zip(*(part.tolist() for part in log_p[i, -1].topk(beams)), strict=True):
                value = float(following[i, -1]) if word == model.config.num_token_id else 0.0
                further.append((score + p, [*row, word], [*v, value]))
        found = sorted(further, reverse=True)[:beams]
    return [(score / steps, row, v) for score, row, v in found]


@pytest.mark.parametrize("use_cache", [True, False])
def test_beams_carry_their_own_values(model, prompts, use_cache: bool) -> None:
    """Beams with a smaller score overtake others, so the values change rows: the search by hand keeps them apart."""
    ids, values, mask = prompts
    out = model.generate(
        ids,
        values,
        attention_mask=mask,
        mode="compatible",
        num_beams=4,
        num_return_sequences=3,
        output_scores=True,
        return_dict_in_generate=True,
        use_cache=use_cache,
        **OPTIONS,
    )
    moved = out.beam_indices[:3, 1:] != out.beam_indices[:3, :-1]
    assert moved.any(), "beams must change places"
    assert_reads_its_own_numbers(model, out.sequences, out.numeric_values, mask.repeat_interleave(3, 0))
    for row in range(2):
        wanted = by_hand(model, ids[row : row + 1], values[row : row + 1], mask[row : row + 1], 4, 8)
        for found, (score, words, numbers) in zip(range(3 * row, 3 * row + 3), wanted, strict=False):
            assert out.sequences[found].tolist() == words
            assert float(out.sequences_scores[found]) == pytest.approx(score, abs=1e-4)
            torch.testing.assert_close(out.numeric_values[found].tolist(), numbers, rtol=1e-4, atol=1e-3)
    assert torch.equal(out.numbers.generated[:, T:], out.sequences[:, T:] == model.config.num_token_id)


def test_beams_read_the_digits_that_are_written(model, prompts) -> None:
    (ids, values, mask), digits = prompts, "auto"
    given = {"attention_mask": mask, "mode": "compatible", "num_beams": 3, "digits": digits}
    found, numbers = model.generate(ids, values, **given, **OPTIONS)
    assert_reads_its_own_numbers(model, found, numbers.values, mask, digits)


@pytest.mark.parametrize("mode", ["standard", "compatible", "ovr"])
def test_scores_are_those_of_forward(model, prompts, mode: str) -> None:
    """compatible: loc_S; standard and ovr: log P of each word, -inf for words that are never written."""
    ids, values, mask = prompts
    given = {"attention_mask": mask, "mode": mode, **OPTIONS, "return_dict_in_generate": True}
    plain = model.generate(ids, values, **given, **({"seed": 1} if mode == "ovr" else {}))
    seen = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    out = model.generate(ids, values, **given, **seen, **({"seed": 1} if mode == "ovr" else {}))
    if mode != "ovr":  # transformers draws other random numbers
        assert torch.equal(out.sequences, plain.sequences)
        torch.testing.assert_close(out.numeric_values, plain.numeric_values, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(out.numbers.p_word, plain.numbers.p_word, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert_reads_its_own_numbers(model, out.sequences, out.numeric_values, mask) if mode != "ovr" else None
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == 8
    whole = torch.nn.functional.pad(mask, (0, 8), value=1)
    with torch.no_grad():
        again = model(
            out.sequences, out.numeric_values, whole, (whole.cumsum(1) - 1).clamp(min=0), output_log_probs=True
        )
    used = model.config.used_rows
    wanted = again.logits if mode == "compatible" else again.log_probs
    for t, score in enumerate(out.scores):
        torch.testing.assert_close(score[:, :used], wanted[:, T - 1 + t, :used], rtol=1e-3, atol=2e-4)
    if mode != "compatible":
        assert torch.isinf(out.scores[0][:, used:]).all()
