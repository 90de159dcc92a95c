"""<NUM> inherits from the tokens that a base spells numerals with; the regression starts where the numbers are."""

import copy
import math
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Pool, groups_of
from support.tiny import HIDDEN, NUM, VOCAB, random_batch, tiny_base, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from cqwen_dist.batch import IGNORE_INDEX, Batch
from cqwen_dist.heads.action import rows_of
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.model.calibration import Calibration, calibrate
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.initialise import start_regression
from cqwen_dist.model.levelling import APART
from cqwen_dist.parallel.vocab_parallel import vocab_range

DIGITS = list(range(80, 90))
WORDS = 80  # words are the ids below; <NUM> and the rows behind it were never in a text
LEADS = 16  # a number follows each of the words below this, whatever the position


@cache
def following() -> Tensor:
    """What comes next, by word [WORDS]; -1: a number. Nothing leads to a word that leads to a number by chance."""
    after = torch.randint(0, WORDS, (WORDS,), generator=torch.Generator().manual_seed(9))
    after[:LEADS] = -1
    return after


def words_and_numbers(rows: int, length: int, seed: int) -> Tensor:
    """Ids [rows,length], -1 where a number is: words that follow `following`, a third of them at random."""
    g = torch.Generator().manual_seed(seed)
    random = torch.randint(0, WORDS, (rows, length), generator=g)
    free = torch.rand(rows, length, generator=g) < 0.35
    ids = random.clone()
    for t in range(1, length):
        last = ids[:, t - 1]
        told = following()[last.clamp(min=0)]
        told = torch.where((last < 0) | (free[:, t] & (told >= 0)), random[:, t], told)
        ids[:, t] = told
    return ids


@cache
@torch.enable_grad()
def digit_base() -> PreTrainedModel:
    """A tiny base that writes one of ten digits where a number comes, and never saw <NUM>."""
    torch.manual_seed(0)
    base = tiny_base()
    optimizer = torch.optim.AdamW(base.parameters(), 1e-2)
    base.train()
    for step in range(120):
        ids = words_and_numbers(16, 16, step)
        digit = torch.randint(0, 10, ids.shape, generator=torch.Generator().manual_seed(step)) + DIGITS[0]
        ids = torch.where(ids < 0, digit, ids)
        logits = base(input_ids=ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return base.eval()


def batch_of(seed: int, *, numbers: bool = True, rows: int = 16, length: int = 20) -> Batch:
    """What a run reads: <NUM> and its value where a number is. A value is 100 and a bit for even leads, else 5."""
    ids = words_and_numbers(rows, length + 1, 1000 + seed)
    g = torch.Generator().manual_seed(seed)
    values = torch.zeros(ids.shape, dtype=torch.float64)
    is_num = ids < 0
    large = torch.cat([torch.zeros(rows, 1, dtype=torch.bool), ids[:, :-1] % 2 == 0], 1)
    drawn = torch.where(large, 100.0, 5.0) * (1 + 0.1 * torch.randn(ids.shape, generator=g))
    values[is_num] = drawn.double()[is_num]
    ids = ids.masked_fill(is_num, NUM)
    labels = ids[:, 1:].clone()
    if not numbers:
        labels[labels == NUM] = IGNORE_INDEX
    return Batch(
        input_ids=ids[:, :-1],
        numeric_values=values[:, :-1],
        attention_mask=torch.ones(rows, length, dtype=torch.bool),
        position_ids=torch.arange(length).expand(rows, -1).contiguous(),
        labels=labels,
        numeric_labels=values[:, 1:].masked_fill(labels != NUM, 0.0),
        numeric_mask=labels == NUM,
    )


def turned(base: PreTrainedModel | None = None, **shape: Any) -> CausalQwenModel:
    """`digit_base` or another turned causal."""
    options = {"w_num_scale": None, "num_row_init": "digits", "numerals": DIGITS, **shape}
    base = copy.deepcopy(base or digit_base())
    torch.manual_seed(1)
    return CausalQwenModel.from_base_model(base, start="calibrated", num_token_id=NUM, **options).eval()


def started(*, numbers: bool = True, **shape: Any) -> tuple[CausalQwenModel, Calibration]:
    """A model after the calibrated start on four batches."""
    model = turned(**shape)
    batches = [batch_of(s, numbers=numbers) for s in range(4)]
    return model, calibrate(model, batches, max_tokens=2000, numerals=shape.get("numerals", DIGITS))


@torch.no_grad()
def scores(model: CausalQwenModel, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """(loc_S, what P ranks by [n,V], labels [n]) of the labelled positions."""
    loc, scale, *_ = model(batch.input_ids, batch.numeric_values, batch.attention_mask)
    keep = batch.label_mask
    return loc[keep], ((loc - model.action.threshold) / scale)[keep], batch.labels[keep]


def f1(said: Tensor, true: Tensor) -> float:
    return 2 * int((said & true).sum()) / int(said.sum() + true.sum())


@pytest.mark.parametrize("shape", [{}, {"number_dims": 4}, {"causal_size": HIDDEN + 5}])
def test_num_is_predicted_only_where_a_number_follows(shape: dict[str, int]) -> None:
    model, report = started(**shape)
    before, after, held = turned(**shape), model, batch_of(100)
    loc, z, labels = scores(after, held)
    number = labels == NUM
    assert 30 < int(number.sum()) < 200
    base_said = scores(before, held)[0].argmax(1)
    assert f1(torch.isin(base_said, torch.tensor(DIGITS)), number) > 0.95, "the base knows where numbers come"
    assert f1(base_said == NUM, number) < 0.05, "and nothing of <NUM>"
    for ranked in (z, loc):
        assert f1(ranked.argmax(1) == NUM, number) > 0.95
        digits = torch.isin(ranked.argmax(1), torch.tensor(DIGITS))
        assert not (digits & number).any(), "digits' own rows win no more where a number follows"
    assert report.num_f1 is not None
    assert report.num_f1 > 0.95
    assert report.num_row_told > 0.5
    assert report.num_p_mean is not None
    assert report.num_p_mean > 0.3
    assert report.accuracy >= report.base_accuracy - 0.03


def test_other_words_are_ranked_as_the_base_ranks_them() -> None:
    held = batch_of(100)
    before, (model, _) = scores(turned(), held)[0], started()
    loc, z, labels = scores(model, held)
    words = labels != NUM
    # exactly one vector was taken from the rows of all words: their softmax among themselves is the same
    torch.testing.assert_close(loc[:, :WORDS].softmax(1), before[:, :WORDS].softmax(1), atol=1e-5, rtol=1e-3)
    said = [x[words][:, :WORDS].argmax(1) for x in (z, before)]
    assert float((said[0] == said[1]).float().mean()) > 0.9, "P ranks nearly so too"
    apart = (loc[:, NUM] - loc.logsumexp(1))[words]
    assert float(apart.median()) < -APART / 2


def test_without_numbers_the_row_is_fitted_to_the_bases_mass_of_digits() -> None:
    model, report = started(numbers=False)
    assert (report.num_f1, report.num_p_mean, report.numbers, report.reg_mdae) == (None, None, 0, None)
    assert report.num_row_told > 0.6
    held = batch_of(100)
    before = scores(turned(), held)[0]
    loc, _, labels = scores(model, held)
    assert report.levelled > 0
    mass = before[:, DIGITS].logsumexp(1)
    # the vector that levelling takes from every row goes from <NUM>'s too: beside a word nothing is seen of it
    told = loc[:, NUM] - loc[:, 3] + before[:, 3]
    residual = (told - mass).double()
    assert float(residual.square().mean() / mass.double().var()) < 0.4
    assert f1(told > before[:, :WORDS].amax(1), labels == NUM) > 0.9, "still the base knows where they come"
    # the digits' own rows are as they were, beside the words'
    own = loc[:, DIGITS] - loc[:, 3:4], before[:, DIGITS] - before[:, 3:4]
    torch.testing.assert_close(*own, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_the_input_row_is_the_mean_of_the_digits(tied: bool) -> None:
    table = tiny_base(tied=tied).get_input_embeddings().weight.detach().clone()
    model = tiny_model(start="calibrated", tied=tied, num_row_init="digits", numerals=DIGITS, w_num_scale=None)
    embedding = model.features.embedding
    row = embedding.token_embedding.weight[NUM] + embedding.num_row
    torch.testing.assert_close(row, table[DIGITS].mean(0), atol=1e-6, rtol=1e-5)
    assert torch.equal(embedding.token_embedding.weight, table), "the table itself is the base's"
    ids, unseen = torch.full((1, 1), NUM), torch.zeros(1, 1, dtype=torch.float64)
    torch.testing.assert_close(embedding(ids, unseen)[0, 0], table[DIGITS].mean(0), atol=1e-6, rtol=1e-5)


def _started_on_ranks(weights: dict[str, Tensor], group: int) -> tuple[dict[str, Any], list[Any]]:
    """The report, what was fitted, and what `rows_of` gives of it."""
    base, groups = tiny_base(), groups_of(group)
    base.load_state_dict(weights)  # trained here again it would round apart
    start, stop = vocab_range(VOCAB, groups.vocab_rank, groups.vocab_size)
    model = turned(base, number_dims=4, vocab_start=start, rows=stop - start)
    batches = [batch_of(s) for s in range(4)][dist.get_rank() :: 2]
    report = calibrate(model, batches, groups=groups, max_tokens=2000, numerals=DIGITS)
    rows, bias = rows_of(model.action.word_head(), [NUM, *DIGITS, 3], groups)
    parts = (rows, bias, model.action.reg_bias, model.abduction.loc_net.weight[-4:], model.action.b_noise)
    return asdict(report), [part.detach().numpy().copy() for part in parts]


@pytest.mark.parametrize("group", [1, 2])
def test_two_ranks_calibrate_as_one(pool: Pool, group: int) -> None:
    model = turned(number_dims=4)
    # in the order of the ranks: what is left out together follows it
    one = asdict(calibrate(model, [batch_of(s) for s in (0, 2, 1, 3)], max_tokens=4000, numerals=DIGITS))
    rows, bias = rows_of(model.action.word_head(), [NUM, *DIGITS, 3])
    parts = (rows, bias, model.action.reg_bias, model.abduction.loc_net.weight[-4:], model.action.b_noise)
    for report, fitted in pool(_started_on_ranks, 2, digit_base().state_dict(), group):
        # P of a best word moves as the ridges round: fp32 logits, decomposed in float64
        assert report.pop("law") == "cauchy"
        assert report == pytest.approx({name: one[name] for name in report}, rel=2e-3, abs=5e-3)
        for found, expected in zip(fitted, parts, strict=True):
            torch.testing.assert_close(torch.from_numpy(found), expected.detach(), atol=2e-3, rtol=2e-3)


@torch.no_grad()
def test_y_starts_as_the_fitted_line() -> None:
    g = torch.Generator().manual_seed(0)
    coefficients = torch.randn(HIDDEN, generator=g, dtype=torch.float64) / 5
    batch = random_batch()
    for dims in (8, 0):
        model = tiny_model(start="calibrated", number_dims=dims)
        start_regression(model, coefficients, 3.5, 0.7)
        keep = batch.label_mask.flatten().nonzero()[:, 0]
        z = model.kept_features(batch, keep)
        u_prime = model.action.add_noise(model.abduction(z))
        y = model.action.number_head.value(u_prime)
        # without number dimensions the words' U is z itself: C_w = H and W_loc is the unit matrix
        expected = z.double() @ coefficients + 3.5
        torch.testing.assert_close(y.loc.double(), expected, atol=1e-5, rtol=1e-5)
        scale = torch.full_like(y.scale, 0.7) if dims else u_prime.scale @ coefficients.abs().float()
        torch.testing.assert_close(y.scale, scale, atol=1e-5, rtol=1e-5)


TARGETS = {
    "none": TargetTransform(),
    "standardise": TargetTransform("standardise", 40.0, 35.0),
    "signed_log": TargetTransform("signed_log"),
    "standardise_log": TargetTransform("standardise_log", 3.0, 1.5),
}


MIDDLE, SPREAD = 2.1, 1.3  # of the line below, about


@torch.no_grad()
def told_by_features(seed: int) -> Batch:
    """A batch whose numbers are a line in z, 50 and 15 to both sides, with wild noise beside it."""
    model, batch = turned(), batch_of(seed)
    keep = batch.numeric_mask.flatten().nonzero()[:, 0]
    line = model.kept_features(batch, keep).double() @ torch.linspace(-1, 1, HIDDEN, dtype=torch.float64).cos()
    g = torch.Generator().manual_seed(seed)
    wild = (math.pi * (torch.rand(len(line), generator=g, dtype=torch.float64) - 0.5)).tan()
    values = batch.numeric_labels.clone()
    values[batch.numeric_mask] = 50 + 15 * (line - MIDDLE) / SPREAD + wild
    return replace(batch, numeric_labels=values)


@pytest.mark.parametrize(("target", "dims"), [*((target, 8) for target in TARGETS), ("none", 0)])
@torch.no_grad()
def test_numbers_start_no_worse_than_their_median(target: str, dims: int) -> None:
    """In each unit, on batches that the start has not seen."""
    model = turned(number_dims=dims, target=asdict(TARGETS[target]))
    report = calibrate(model, [told_by_features(s) for s in range(4)], max_tokens=2000, numerals=DIGITS)
    held = told_by_features(100)
    *_, loc_y, scale_y = model(held.input_ids, held.numeric_values, held.attention_mask)
    true = held.numeric_labels[held.numeric_mask]
    error = float((model.target.inverse(loc_y[held.numeric_mask]) - true).abs().median())
    of_median = float((true - true.quantile(0.5)).abs().median())
    assert error <= of_median
    assert report.reg_mdae is not None
    assert report.reg_median_mdae is not None
    assert report.reg_mdae <= report.reg_median_mdae
    assert report.reg_mdae < 0.8 * report.reg_median_mdae, "something is there to be told"
    assert report.numbers > 50
    assert (scale_y[held.numeric_mask] > 0).all()
    assert loc_y.isfinite().all()
