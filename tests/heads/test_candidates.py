"""Candidates: the values that a text gives, the loss of their scores, the bar, and what is written."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.numerics import assert_close
from support.ranks import run_ranks
from support.tiny import NUM, random_batch, tiny_causal_lm, tiny_model
from tables.test_wide import batch_of

from cqwen_dist.config.shape import CHARACTERS, COMPUTED, FORM_ROWS, PLACES, SIGNS
from cqwen_dist.heads import candidates as of_candidates
from cqwen_dist.heads.candidates import (
    HELD,
    LINK,
    NOISE,
    SHARPENED,
    CandidateLabels,
    again,
    best_bar,
    forms_of,
    to_12_digits,
)
from cqwen_dist.heads.expression import LONGEST, VALUE, at_beginning, read_tokens, states_at, symbol_table
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
    """A start on this rank's share, evaluated: (weights of the scores, numbers behind the intervals, metrics)."""
    rank, world, groups = dist.get_rank(), dist.get_world_size(), build_groups(1)
    target = {"name": "standardise", "median": 5000.0, "scale": 2500.0}
    model = tiny_model(start="calibrated", number_dims=2, candidates="arithmetic", target=target)
    learnt, judged = lines(rows), lines(test_rows, seed=3)

    def batches(texts, size):
        first = range(rank * size, len(texts[0]), world * size)
        return [batch_of(*(part[at : at + size] for part in texts)) for at in first]

    calibrate(model, batches(learnt, 40), groups=groups, max_tokens=rows)
    evaluator = Evaluator(model.eval(), model.kept_features, batches(judged, 50), groups, baseline_value=5000.0)
    found = evaluator()
    return model.action.candidate_weight.detach(), evaluator.factors.n, found


def test_last_numbers_equal_a_plain_loop():
    draw = torch.Generator().manual_seed(1)
    is_number = torch.rand(5, 40, generator=draw) < 0.8
    values = torch.rand(5, 40, generator=draw, dtype=torch.float64) * is_number
    begins = torch.rand(5, 40, generator=draw) < 0.08
    begins[:, 0] = True
    at = torch.arange(40).expand(5, 40)
    positions = at - torch.where(begins, at, 0).cummax(1).values
    head = tiny_model(candidates="arithmetic").action.number_head
    found = head.memory(at, is_number, values, positions, torch.arange(200))[:, :PLACES].view(5, 40, PLACES)
    for row in range(5):
        for place in range(40):
            start = place - int(positions[row, place])
            own = [float(values[row, i]) for i in range(place, start - 1, -1) if is_number[row, i]][:PLACES]
            assert [v for v in found[row, place].tolist() if not math.isnan(v)] == own
    assert head.memory(at, is_number, values, positions, torch.arange(0)).shape == (0, head.memory_size)


SYMBOLS = {sign: [i + 1] for i, sign in enumerate(SIGNS)} | {"": [11], ")=": [12]}
TABLE = symbol_table(SYMBOLS, 20, 15)  # 13: another word
TEXTS = {
    "48 / 2 =": 24.0,
    "2 + 3 * 4 - 1 =": 13.0,
    "( 2 + 3 ) * 4 =": 20.0,
    "2 ( 3 + 4 )=": 14.0,
    "100 - ( 20 - 5 )=": 85.0,
    "0.1 * 3 =": 0.3,
    "20 % =": 0.2,
    "6 * 8 = 48 / 2 =": 24.0,  # an equals sign begins anew
    "7 5 - 3 =": 2.0,  # and so do two numbers side by side
    "1 / 0 =": None,
    "5 =": None,  # nothing is computed
    "5 + =": None,
    "5 + 3": None,
    "5 + 3 = 8": None,  # it has been written
    "3 - 5 = -": 2.0,  # its sign has been written
    "3 - 5 = - -": None,
    "5 - 3 = -": None,
    "( ( 1 + 2 )=": None,  # one level of brackets
    "2 apples + 3 =": None,
    "20 eggs * 40 % =": None,  # a word cut off what stands before the operator
    "x + 3 * - 5 =": None,  # algebra
    "- 5 * 3 =": 15.0,  # a bullet
    " + ".join(["1"] * 11) + " =": 11.0,
    " + ".join(["1"] * 12) + " =": None,  # too long
}


def _tokens(text):
    ids, values = [], []
    for word in text.split():
        number = word[0].isdigit()
        ids.append(15 if number else SYMBOLS[word][0] if word in SYMBOLS else 13)
        values.append(float(word) if number else 0.0)
        ids.append(11)
        values.append(0.0)
    return torch.tensor(ids[:-1]), torch.tensor(values[:-1], dtype=torch.float64)


@pytest.mark.parametrize(("text", "value"), TEXTS.items())
def test_an_expression_has_its_value(text, value):
    ids, values = _tokens(text)
    state = at_beginning(1, ids.device)
    for token, number in zip(ids, values, strict=True):
        state = read_tokens(state, TABLE[token][None], number[None])
    found = to_12_digits(state[0, VALUE])
    assert value == float(found) if value is not None else not bool(found.isfinite())


def test_a_window_reads_expressions_as_a_stream_does():
    """Packed texts of signs, words and numbers: at every token both have the same value."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.tensor([1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13])[torch.randint(15, (6, 150), generator=draw)]
    ids[:, ::2] = 15
    ids[(ids > 4) & (ids < 15) & (torch.rand(6, 150, generator=draw) < 0.5)] = 7
    ids[:3, 1::2][ids[:3, 1::2] == 7] = 1  # long ones
    values = torch.randint(1, 9, (6, 150), generator=draw).double() * (ids == 15)
    places, state = torch.arange(150).expand(6, 150), at_beginning(1, ids.device)
    begins = (torch.rand(6, 150, generator=draw) < 0.02) | (places == 0)
    positions = places - torch.where(begins, places, 0).cummax(1).values
    found = states_at(TABLE[ids], values, positions, torch.arange(900)).view(6, 150, -1)
    seen = 0
    for row in range(6):
        for place in range(150):
            state = at_beginning(1, ids.device) if positions[row, place] == 0 else state
            state = read_tokens(state, TABLE[ids[row, place]][None], values[row, place][None])
            assert torch.equal(state[0, VALUE].nan_to_num(-1), found[row, place, VALUE].nan_to_num(-1))
            seen += bool(state[0, VALUE].isfinite())
    assert seen > 20
    assert int(found[..., -1].max().nan_to_num(posinf=1e9)) > LONGEST, "some are too long for the window"


def test_computed_values_are_operations_on_the_last_two_and_constants():
    head = tiny_model(candidates="arithmetic", constants=[2.0, 60.0]).action.number_head
    ids = torch.tensor([[NUM, 4, NUM, 4]])
    values = torch.tensor([[8.0, 0.0, 0.1, 0.0]], dtype=torch.float64)
    memory = head.memory(ids, ids == NUM, values, torch.arange(4)[None], torch.tensor([0, 3]))
    first, last = head.candidates(memory)
    assert last[:3].nan_to_num(-1).tolist() == [0.1, 8.0, -1]
    computed = last[PLACES + 1 :][: 7 + 2].tolist()
    assert computed == [8.1, 7.9, 0.8, 80.0, 0.008, -7.9, 0.0125, 2.0, 60.0]
    assert first[:2].nan_to_num(-1).tolist() == [8.0, -1]
    assert first.isfinite().sum() == 3, "one number has no operations"
    assert len(head.names) == len(last)


def test_the_bar_is_where_the_sum_of_the_gains_is_largest():
    draw = np.random.default_rng(0)
    p, gain = draw.random(60).round(1) + 0.05, draw.normal(size=60)
    sums = {bar: gain[p > bar].sum() for bar in (*np.unique(p) - 0.01, 2.0)}
    assert gain[p > best_bar(p, gain)].sum() == pytest.approx(max(sums.values()))
    assert best_bar(p, -np.ones(60)) == 1.0
    assert best_bar(p, np.ones(60)) < p.min()
    assert best_bar(p, np.full(60, 0.05)) == 1.0, "too little for a number that may be a prediction"
    many, nearer = np.linspace(1.0, 0.1, 320), np.ones(320)
    for below, bar in ((9, 0.0), (10, pytest.approx(many[310], abs=0.01))):
        nearer[-below:] = -1.0
        assert best_bar(many, nearer) == bar, "a few below show nothing"
    assert best_bar(np.zeros(0), np.zeros(0)) == 0.5


@pytest.mark.parametrize("softmax", [0.0, 3.0])
def test_the_loss_is_one_vs_rest_over_the_candidates_there_are(softmax):
    """Against arctangents in float64, and its gradient by finite differences (1e-6: central, step 1e-5)."""
    terms = {"softmax_weight": softmax}
    action = tiny_model(number_dims=2, candidates="arithmetic", word_terms=terms).double().action
    parameters = [action.candidate_weight, action.candidate_bias, action.candidate_noise]
    parameters += [action.candidate_forms, action.candidate_form_bias]
    rows, _, _, of_forms, shift = (each.data for each in parameters)
    for seed, each in enumerate((of_forms, shift), 2):
        each.normal_(generator=torch.Generator().manual_seed(seed))
    rows.normal_(generator=torch.Generator().manual_seed(0))
    u = Cauchy(*torch.rand(2, 3, action.b_noise.numel(), generator=torch.Generator().manual_seed(1)).double())
    candidates = torch.full((2, len(rows)), math.nan).double()
    candidates[0, [0, 1, 2, PLACES, -1]] = torch.tensor([4.0, 6.0, 4.0, 4.0, 7.0]).double()
    candidates[1, 0] = 6.0
    is_number = torch.tensor([True, True, False])
    raw, at = torch.tensor([6.0, 6.0 + 1e-12, 4.0]).double(), torch.tensor([0, 1])
    labels = CandidateLabels(raw, is_number, at, candidates, raw[at])

    def p(i: int, j: int, digit: int, k: int) -> torch.Tensor:
        two, length = 4 + 12 + 13 * digit + 12, 4 + 12 + 11 * 13  # one digit, and so none behind it
        forms, words = [k, 4 + digit, two, length], action.word_size
        row = rows[j] + of_forms[forms].sum(0)
        bias = action.candidate_bias[j] + shift[forms].sum()
        scale = u.scale[i, :words] @ row.abs() + action.candidate_noise[j].abs()
        return 0.5 + ((u.loc[i, :words] @ row + bias) / scale).atan() / math.pi

    # Two places and an operation have the value 4, and no place the constant 7
    wrong = p(0, 0, 4, 1), p(0, 2, 4, 1), p(0, PLACES, 4, 3), p(0, len(rows) - 1, 7, 2)
    expected = -(sum((1 - each).log() for each in wrong) + p(0, 1, 6, 0).log() + p(1, 0, 6, 0).log())
    # The one that is right among all five; in the second text nothing else is there
    right, *others = (torch.tan(math.pi * (each - 0.5)).exp() for each in (p(0, 1, 6, 0), *wrong))
    expected -= softmax * (right / (right + sum(others))).log()
    found = action.number_head.loss(u, labels)[1]
    assert float(found) == pytest.approx(float(expected), rel=1e-9)

    found.backward()
    for parameter in parameters:
        flat, step = parameter.data.view(-1), 1e-5
        for i in (0, 1, 6 * rows.shape[1] % len(flat), len(flat) - 1):
            ends = []
            for sign in (1, -1):
                flat[i] += sign * step
                ends.append(float(action.number_head.loss(u, labels)[1]))
                flat[i] -= sign * step
            assert float(parameter.grad.view(-1)[i]) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-6)


def test_the_forms_of_numbers_are_their_characters_and_their_length():
    values = torch.tensor([[7.0, 72.0, -3.5, 0.25, 1234567.5, 1e20, math.nan]]).double()
    again, *rest = forms_of(values)[0].T
    first, two, length = (kind - begin for kind, begin in zip(rest, (4, 16, 159), strict=True))
    none = FORM_ROWS
    assert again.tolist() == [0] * 7
    assert [CHARACTERS[i] for i in first[:5]] == ["7", "7", "-", "0", "1"]
    assert (two[:5] % 13).tolist() == [12, 2, 3, 11, 2]
    assert torch.equal(two[:5] // 13, first[:5])
    assert length[:5].tolist() == [0, 1, 3, 3, 6]
    assert [kind[5:].tolist() for kind in rest] == [[none, none]] * 3
    assert int(rest[-1][:5].max()) < none


def test_the_start_knows_whether_a_number_was_used():
    """Of three numbers two are equal, at any places; the last word says whether the third follows or one of the two."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 60, (120, 7), generator=draw)
    ids[:, [1, 3, 5]] = NUM
    once, twice = torch.rand(2, 120, 1, generator=draw, dtype=torch.float64) * 1e4
    alone = torch.arange(3) == torch.randint(0, 3, (120, 1), generator=draw)
    values = torch.zeros(120, 7, dtype=torch.float64)
    values[:, [1, 3, 5]] = once.where(alone, twice)
    new = torch.rand(120, generator=draw) < 0.5
    ids[:, 6] = LAST + new.long()
    numbers = once[:, 0].where(new, twice[:, 0])
    model = tiny_model(start="calibrated", number_dims=2, candidates="arithmetic", constants=[60.0])
    calibrate(model, [batch_of(ids, values, numbers)], max_tokens=120)
    head, at = model.action.number_head, torch.full((120,), 6) + 7 * torch.arange(120)
    memory = head.memory(ids, ids == NUM, values, torch.arange(7).expand(120, 7), at)
    k = again(head.candidates(memory))
    assert torch.equal(k[:, :3], 1 - alone.flip(1).long()), "the last number comes first"
    assert k[:, PLACES + COMPUTED].eq(2).all(), "no text has the constant"
    u = model.abduction(model.features(ids, values)[:, 6])
    scores = model.action.word_part(u).affine(model.action.candidate_forms, model.action.candidate_form_bias).loc[:, :4]
    of_new = scores[:, 0] - scores[:, 1]
    assert (of_new > 0).eq(new).double().mean() > 0.95
    assert (head.decide(u, memory).likeliest == numbers).double().mean() > 0.95  # a third by its place alone


def test_the_start_knows_how_the_base_begins_a_numeral(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(of_candidates, "SHARPENINGS", 0)
    model = tiny_model(start="calibrated", number_dims=2, candidates="arithmetic", digit_rows=list(range(12)))
    calibrate(model, [batch_of(*lines(40))], max_tokens=40)
    rows, found = model.action.cls_weight[:12], model.action.candidate_forms[4 : 4 + 12]
    assert_close(found, LINK * (rows - rows.mean(0)), 1e-6)
    assert found.abs().sum() > 0


def test_the_last_fit_is_at_the_least_of_both_losses_whatever_the_order_of_the_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(of_candidates, "SHARPENINGS", 100)
    ids, values, numbers = lines(60)
    values, numbers = values.round(), numbers.round()  # numerals differ in their first characters and lengths
    model = tiny_model(start="calibrated", number_dims=2, candidates="arithmetic", constants=[60.0])
    head, net = model.action.number_head, model.action
    at = torch.full((60,), 6) + 7 * torch.arange(60)
    memory = head.memory(ids, ids == NUM, values, torch.arange(7).expand(60, 7), at)
    x = torch.randn(60, net.word_size, generator=torch.Generator().manual_seed(1)).double()
    net.candidate_weight.data.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(2))
    begun = {name: getattr(net, name).detach().double().clone() for name in SHARPENED}
    found = head.sharpened(x, numbers, memory, None)
    turned = head.sharpened(x.flip(0), numbers.flip(0), memory.flip(0), None)
    for name in SHARPENED:
        assert_close(turned[name], found[name], 1e-5)  # float32 of fits that stop at a gradient of 1e-7

    # The derivatives of both losses are zero; plain formulas in float64
    held = head.candidates(memory)
    known, right, forms = ~held.isnan(), held == numbers[:, None], F.one_hot(forms_of(held), FORM_ROWS + 1).sum(-2)
    parts = {name: part.double().requires_grad_() for name, part in found.items()}
    weight, of_forms, bias, form_bias = parts.values()
    told = x @ of_forms.T + form_bias
    strength = (x @ weight.T + bias + torch.einsum("nf,njf->nj", told, forms[..., :-1].double())) / NOISE
    share = torch.where(known, strength, -torch.inf).softmax(-1)
    nll = -(share * right).sum(-1)[right.any(-1)].log().sum()
    mean, far = x.mean(0), torch.zeros(())
    unit = (x - mean).square().mean().sqrt()
    for of_weight, of_bias in (SHARPENED[::2], SHARPENED[1::2]):
        moved = (parts[of_weight] - begun[of_weight]) / NOISE
        shifted = (parts[of_bias] - begun[of_bias]) / NOISE + moved @ mean
        if of_bias == "candidate_bias":  # less the common shift, which the softmax and so the ridge cannot cause
            shifted = shifted - shifted.mean().detach()
        far = far + (unit * moved).square().sum() + shifted.square().sum()
    both, of_nll = (
        max(float(slope.abs().max()) for slope in torch.autograd.grad(of, list(parts.values()), retain_graph=True))
        for of in (nll + HELD / 2 * far, nll)
    )
    assert both < 1e-3 * of_nll  # float32 parameters
    p = 0.5 + strength.atan() / math.pi
    one_vs_rest = -torch.where(right, p, 1 - p).log()[known].sum()
    (slope,) = torch.autograd.grad(one_vs_rest, [bias])
    assert abs(float(slope.sum())) < 1e-3
    assert abs(float(slope.abs().sum())) > 1.0, "no derivative of one candidate alone is zero"


def test_the_calibrated_start_learns_which_number_it_is_on_any_number_of_ranks():
    (weight, count, found), *_ = run_ranks(_judged, 1, 240, 200)
    old = float((lines(200, seed=3)[0][:, 6] < NEW).double().mean())
    assert found["eval/candidates"] == pytest.approx(old, abs=0.07)
    assert found["eval/candidates_right"] > 0.9
    assert found["eval/exact"] > old - 0.05
    assert found["eval/reg_mdae"] < 1e-3  # two thirds are exact, but for fp32
    # The intervals are those of new numbers
    assert count == pytest.approx(200 * (1 - old), abs=14)  # as many as 0.07 of 200
    assert 0.7 < found["eval/coverage_90_conformal"] <= 1.0
    for other, _, same in run_ranks(_judged, 2, 240, 200):
        assert_close(other, weight, 1e-3)  # the rows in another order, then a ridge
        assert same["eval/candidates"] == pytest.approx(found["eval/candidates"], abs=0.03)  # six numbers


def test_an_exact_number_is_written_digit_by_digit():
    model = tiny_causal_lm(number_dims=2, candidates="arithmetic")
    action = model.model.action
    action.cls_bias.data[NUM] += 50.0  # every token is a number
    action.candidate_bias.data.fill_(-5.0)
    action.candidate_bias.data[1] = 5.0  # and each is the last but one
    values = torch.tensor([[0.0, 123456.78901234567, 0.0, -7e-9, 0.0]], dtype=torch.float64)
    ids = torch.tensor([[3, NUM, 4, NUM, 5]])
    for options in ({}, {"use_cache": False}, {"digits": 2}):
        _, numbers = model.generate(ids, values, max_new_tokens=4, return_numbers=True, **options)
        assert numbers.values[0, 5:].tolist() == [123456.78901234567, -7e-9] * 2
        record = numbers.record(0, 5, 3)
        assert (record.value, record.written) == (123456.78901234567, 123456.78901234567)
        assert record.source == "the number 2 before"
    action.candidate_bias.data.fill_(-5.0)
    _, numbers = model.generate(ids, values, max_new_tokens=2, return_numbers=True)
    assert (numbers.which == -1).all()
    assert numbers.record(0, 5).source is None


def test_behind_an_expression_its_value_is_written():
    action = tiny_model(number_dims=2, candidates="arithmetic", symbols={"/": [3], "=": [5]}, constants=[7.0]).action
    head, bias = action.number_head, action.candidate_bias.data
    ids, values = torch.tensor([[NUM, 3, NUM, 5]]), torch.tensor([[48.0, 0.0, 2.0, 0.0]], dtype=torch.float64)
    memory = head.memory(ids, ids == NUM, values, torch.arange(4)[None], torch.tensor([2, 3]))
    u = Cauchy(*torch.rand(2, 2, action.b_noise.numel()))
    bias.fill_(0.1)[0] = 5.0  # the last number is the likeliest
    assert head.decide(u, memory).exact.tolist() == [2.0, 24.0]
    assert head.decide(u, memory).which.tolist() == [0, PLACES]
    bias[PLACES] = -5.0
    found = head.decide(u, memory)
    assert found.exact.tolist() == [2.0, 24.0], "however unlikely: nothing is miscalculated"
    assert found.p.gt(0.5).tolist() == [True, False]


def test_rows_of_a_batch_copy_their_own_numbers():
    model = tiny_causal_lm(number_dims=2, candidates="arithmetic")
    model.model.action.candidate_weight.data.normal_(generator=torch.Generator().manual_seed(0))
    model.model.action.candidate_bias.data.fill_(0.5)
    model.model.action.cls_bias.data[NUM] += 50.0
    rows = [([3, NUM, 4], [0.0, 5.5, 0.0]), ([NUM, NUM, 7, NUM, 9], [1.0, 2.0, 0.0, 3.0, 0.0])]
    ids, values, mask = torch.full((2, 5), 1), torch.zeros(2, 5).double(), torch.zeros(2, 5).bool()
    for row, (own, held) in enumerate(rows):
        ids[row, -len(own) :], values[row, -len(own) :] = torch.tensor(own), torch.tensor(held).double()
        mask[row, -len(own) :] = True
    _, both = model.generate(ids, values, attention_mask=mask, max_new_tokens=5, return_numbers=True)
    assert (both.which >= 0).any()
    for row, (own, held) in enumerate(rows):
        alone = torch.tensor([own]), torch.tensor([held]).double()
        _, numbers = model.generate(*alone, max_new_tokens=5, return_numbers=True)
        assert_close(both.values[row, 5:], numbers.values[0, len(own) :], 1e-5)
        assert torch.equal(both.which[row, 5:], numbers.which[0, len(own) :])


def test_hugging_face_labels_give_the_trainers_loss_of_candidates():
    model = tiny_causal_lm(number_dims=2, candidates="arithmetic")
    batch = random_batch()
    ids, values = batch.input_ids, batch.numeric_values
    out = model(ids, values, batch.attention_mask, labels=ids)
    out.loss.backward()
    grad = model.model.action.candidate_weight.grad
    assert grad.abs().sum() > 0
    plain = tiny_causal_lm(number_dims=2)
    plain.load_state_dict(model.state_dict(), strict=False)
    assert float(plain(ids, values, batch.attention_mask, labels=ids).loss) < float(out.loss)
