"""Copies: the numbers before a place, the loss of their scores, and what is written."""

import math

import pytest
import torch
import torch.distributed as dist
from support.numerics import assert_close
from support.ranks import run_ranks
from support.tiny import NUM, random_batch, tiny_causal_lm, tiny_model
from tables.test_wide import batch_of

from cqwen_dist.heads.number_head import NumberLabels
from cqwen_dist.heads.number_kinds import CopyLabels
from cqwen_dist.model.calibration import calibrate
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.training.evaluation.evaluator import Evaluator

LAST, BEFORE, NEW = 70, 71, 72  # the word before a number says what it is


def lines(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, values, the number that follows): two numbers and a word that says which of them follows, or a new one."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 60, (rows, 7), generator=draw)
    ids[:, [1, 4]] = NUM
    values = torch.zeros(rows, 7, dtype=torch.float64)
    values[:, [1, 4]] = torch.rand(rows, 2, generator=draw, dtype=torch.float64) * 1e4
    kind = torch.randint(0, 3, (rows,), generator=draw)
    ids[:, 6] = LAST + kind
    new = torch.rand(rows, generator=draw, dtype=torch.float64) * 1e4
    return ids, values, torch.stack([values[:, 4], values[:, 1], new])[kind, torch.arange(rows)]


def _judged(rows: int, test_rows: int) -> tuple[torch.Tensor, int, dict[str, float]]:
    """A start on this rank's share, evaluated: (weights of the copies, numbers behind the intervals, metrics)."""
    rank, world, groups = dist.get_rank(), dist.get_world_size(), build_groups(1)
    target = {"name": "standardise", "median": 5000.0, "scale": 2500.0}
    model = tiny_model(start="calibrated", number_dims=2, copies=2, target=target)
    learnt, judged = lines(rows), lines(test_rows, seed=3)

    def batches(texts, size):
        first = range(rank * size, len(texts[0]), world * size)
        return [batch_of(*(part[at : at + size] for part in texts)) for at in first]

    calibrate(model, batches(learnt, 40), groups=groups, max_tokens=rows)
    evaluator = Evaluator(model.eval(), model.kept_features, batches(judged, 50), groups, baseline_value=5000.0)
    found = evaluator()
    return model.action.copy_weight.detach(), evaluator.factors.n, found


@pytest.mark.parametrize("count", [0, 1, 3])
def test_last_numbers_equal_a_plain_loop(count):
    draw = torch.Generator().manual_seed(count)
    is_number = torch.rand(5, 23, generator=draw) < 0.4
    values = torch.rand(5, 23, generator=draw, dtype=torch.float64) * is_number
    begins = torch.rand(5, 23, generator=draw) < 0.15
    begins[:, 0] = True
    at = torch.arange(23).expand(5, 23)
    positions = at - torch.where(begins, at, 0).cummax(1).values
    head = tiny_model(copies=count).action.number_head
    found = head.memory(is_number, values, positions)
    for row in range(5):
        for place in range(23):
            start = place - int(positions[row, place])
            own = [float(values[row, i]) for i in range(place, start - 1, -1) if is_number[row, i]][:count]
            assert [v for v in found[row, place].tolist() if not math.isnan(v)] == own
    assert head.memory(is_number[:0], values[:0], positions[:0]).shape == (0, 23, count)


def test_the_copy_loss_is_one_vs_rest_over_existing_numbers():
    """Against arctangents in float64, and its gradient by finite differences (1e-6: central, step 1e-5)."""
    action = tiny_model(number_dims=2, copies=2).double().action
    action.copy_weight.data.normal_(generator=torch.Generator().manual_seed(0))
    u = Cauchy(*torch.rand(2, 3, action.b_noise.numel(), generator=torch.Generator().manual_seed(1)).double())
    recent = torch.tensor([[4.0, 6.0], [6.0, math.nan], [4.0, 4.0]]).double()
    is_number = torch.tensor([True, True, False])
    raw = torch.tensor([6.0, 6.0, 4.0]).double()
    labels = CopyLabels(raw, is_number, NumberLabels(raw, is_number), recent, raw)

    words = action.word_size
    loc = u.loc[:, :words] @ action.copy_weight.T + action.copy_bias
    scale = u.scale[:, :words] @ action.copy_weight.abs().T + action.copy_noise.abs()
    p = 0.5 + (loc / scale).atan() / math.pi
    expected = -((1 - p[0, 0]).log() + p[0, 1].log() + p[1, 0].log())
    found = action.number_head.loss(u, labels, stop=True)[1]
    assert float(found) == pytest.approx(float(expected), rel=1e-9)

    found.backward()
    for parameter in (action.copy_weight, action.copy_bias, action.copy_noise):
        flat, step = parameter.data.view(-1), 1e-5
        for i in (0, len(flat) - 1):
            ends = []
            for sign in (1, -1):
                flat[i] += sign * step
                ends.append(float(action.number_head.loss(u, labels, stop=True)[1]))
                flat[i] -= sign * step
            assert float(parameter.grad.view(-1)[i]) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-6)


def test_the_calibrated_start_learns_copies_on_any_number_of_ranks():
    (weight, count, found), *_ = run_ranks(_judged, 1, 240, 200)
    old = float((lines(200, seed=3)[0][:, 6] < NEW).double().mean())
    assert found["eval/copied"] == pytest.approx(old, abs=0.05)
    assert found["eval/copy_accuracy"] > 0.95
    assert found["eval/reg_mdae"] < 1e-3  # two thirds are exact, but for fp32
    # The intervals are those of new numbers
    assert count == pytest.approx(200 * (1 - old), abs=8)
    assert 0.7 < found["eval/coverage_90_conformal"] <= 1.0
    for other, _, same in run_ranks(_judged, 2, 240, 200):
        assert_close(other, weight, 1e-3)  # the rows in another order, then a ridge
        assert same["eval/copied"] == pytest.approx(found["eval/copied"], abs=0.01)


def test_a_copied_number_is_written_digit_by_digit():
    model = tiny_causal_lm(number_dims=2, copies=2)
    action = model.model.action
    action.cls_bias.data[NUM] += 50.0  # every token is a number
    action.copy_bias.data.copy_(torch.tensor([-5.0, 5.0]))  # and each is the last but one
    values = torch.tensor([[0.0, 123456.78901234567, 0.0, -7e-9, 0.0]], dtype=torch.float64)
    ids = torch.tensor([[3, NUM, 4, NUM, 5]])
    for options in ({}, {"use_cache": False}, {"digits": 2}):
        _, numbers = model.generate(ids, values, max_new_tokens=4, return_numbers=True, **options)
        assert numbers.values[0, 5:].tolist() == [123456.78901234567, -7e-9] * 2
        record = numbers.record(0, 5, 3)
        assert (record.copied, record.value, record.written) == (True, 123456.78901234567, 123456.78901234567)
    action.copy_bias.data.fill_(-5.0)
    _, numbers = model.generate(ids, values, max_new_tokens=2, return_numbers=True)
    assert not numbers.copied.any()
    assert not numbers.record(0, 5).copied


def test_rows_of_a_batch_copy_their_own_numbers():
    model = tiny_causal_lm(number_dims=2, copies=3)
    model.model.action.copy_weight.data.normal_(generator=torch.Generator().manual_seed(0))
    model.model.action.copy_bias.data.fill_(0.5)
    model.model.action.cls_bias.data[NUM] += 50.0
    rows = [([3, NUM, 4], [0.0, 5.5, 0.0]), ([NUM, NUM, 7, NUM, 9], [1.0, 2.0, 0.0, 3.0, 0.0])]
    ids, values, mask = torch.full((2, 5), 1), torch.zeros(2, 5).double(), torch.zeros(2, 5).bool()
    for row, (own, held) in enumerate(rows):
        ids[row, -len(own) :], values[row, -len(own) :] = torch.tensor(own), torch.tensor(held).double()
        mask[row, -len(own) :] = True
    _, both = model.generate(ids, values, attention_mask=mask, max_new_tokens=5, return_numbers=True)
    assert both.copied.any()
    for row, (own, held) in enumerate(rows):
        alone = torch.tensor([own]), torch.tensor([held]).double()
        _, numbers = model.generate(*alone, max_new_tokens=5, return_numbers=True)
        assert_close(both.values[row, 5:], numbers.values[0, len(own) :], 1e-5)
        assert torch.equal(both.copied[row, 5:], numbers.copied[0, len(own) :])


def test_hugging_face_labels_give_the_trainers_copy_loss():
    model = tiny_causal_lm(number_dims=2, copies=2)
    batch = random_batch()
    ids, values = batch.input_ids, batch.numeric_values
    out = model(ids, values, batch.attention_mask, labels=ids)
    out.loss.backward()
    grad = model.model.action.copy_weight.grad
    assert grad.abs().sum() > 0
    plain = tiny_causal_lm(number_dims=2)
    plain.load_state_dict(model.state_dict(), strict=False)
    assert float(plain(ids, values, batch.attention_mask, labels=ids).loss) < float(out.loss)
