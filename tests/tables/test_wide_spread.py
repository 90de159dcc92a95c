"""The spread of the wide part: its closed form against scikit-learn, what it finds and what not, and the law of Y."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from support.numerics import assert_close
from support.tiny import NUM, VOCAB, tiny_model
from tables.test_wide import BUCKETS, batch_of, texts

from cqwen_dist.heads.abduction import AbductionNetwork
from cqwen_dist.model.calibration import calibrate
from cqwen_dist.model.embedding import phi
from cqwen_dist.tables.wide.wide_part import FAR, MOST, WidePart
from cqwen_dist.tables.wide.wide_rows import WIDTHS, NamedRows, texts_before
from cqwen_dist.tables.wide.wide_size import FOLDS
from cqwen_dist.tables.wide.wide_start import SPREAD_RIDGES as RIDGES
from cqwen_dist.tables.wide.wide_start import fit_spread, fit_wide

FEW_BUCKETS = 256
WORD = 30  # where it stands, errors are FACTOR times as large
FACTOR = 6.0


def law_of(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, values, targets, whether WORD stands in the text): half the texts have it as their fourth word, and half
    have another as their fifth, which alone tells the number's location."""
    ids, values = texts(count, seed=seed)
    draw = torch.Generator().manual_seed(seed + 1)
    loud, high = torch.rand(2, count, generator=draw) < 0.5
    ids[:, 3] = torch.where(loud, WORD, 31)
    ids[:, 4] = torch.where(high, 32, 33)
    noise = torch.randn(count, generator=draw, dtype=torch.float64)
    y = 10 * high + noise * torch.where(loud, FACTOR, 1.0)
    return ids, values, y, loud


def test_the_scale_is_a_ridge_regression_of_log_errors():
    """To 1e-8: both in float64. Each fold's numbers do not enter its own fit."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((300, 12))
    error = draw.standard_normal(300) * np.exp(x[:, 0])
    folds = np.arange(300) % FOLDS
    left_out, solved = fit_spread(x @ x.T, error, folds, 300)
    size = np.abs(error) / np.median(np.abs(error))
    goal = np.log(size.clip(0.05))
    goal -= goal.mean()
    unit = (x**2).sum() / 300
    gaps = []
    for ridge in RIDGES:
        for share in (1.0, 0.75, 0.5, 0.25):
            h = np.zeros(300)
            for fold in range(FOLDS):
                own = folds == fold
                h[own] = share * Ridge(ridge * unit, fit_intercept=False).fit(x[~own], goal[~own]).predict(x[own])
            gaps.append(np.abs(h.clip(-MOST, MOST) - left_out).max())
    assert min(gaps) < 1e-8
    for fold in range(FOLDS):
        own = folds == fold
        assert not solved[fold, own].any()
        h = (x @ x.T)[own] @ solved[fold]
        np.testing.assert_allclose(h.clip(-MOST, MOST), left_out[own], atol=1e-8)


def test_equal_spread_gives_one_scale():
    draw = np.random.default_rng(1)
    x = draw.standard_normal((300, 40))
    for law in (draw.standard_normal, draw.standard_cauchy):
        left_out, solved = fit_spread(x @ x.T, law(300), np.arange(300) % FOLDS, 300)
        assert not left_out.any()
        assert not solved.any()


def test_a_word_with_larger_errors_gets_a_larger_scale():
    ids, values, y, _ = law_of(500)
    part = WidePart(BUCKETS, NUM, VOCAB)
    found = fit_wide(texts_before(part, batch_of(ids, values, y), torch.arange(500) * 9 + 8), y, BUCKETS)
    part.weight.data.copy_(found.tables["weight"])
    assert_close(part.train()(ids, values)[0][1, :, -1], found.spread.float(), 1e-4)
    new, new_values, _, louder = law_of(200, seed=4)
    h = part.eval()(new, new_values)[0][1, :, -1]
    apart = h[louder].mean() - h[~louder].mean()
    assert 0.2 * math.log(FACTOR) < apart < math.log(FACTOR)  # shrunk, and the location errs too


def test_the_calibrated_start_gives_each_number_its_own_scale():
    """The median of |error| / scale_Y is 1 for a Cauchy, whatever the text says."""
    shape = {"start": "calibrated", "number_dims": 2, "target": {"name": "standardise", "median": 1.0, "scale": 2.0}}
    ids, values, y, _ = law_of(200)
    model = tiny_model(**shape, wide=FEW_BUCKETS)
    calibrate(model, [batch_of(ids[at : at + 40], values[at : at + 40], y[at : at + 40]) for at in range(0, 200, 40)])
    new, new_values, truth, loud = law_of(400, seed=4)
    _, _, loc, scale = (part[:, -1].detach() for part in model.eval()(new, new_values))
    error = (loc - model.target.forward(truth)).abs()
    plain, own = (float((e[loud].median() / e[~loud].median()).log()) for e in (error, error / scale))
    assert plain > 0.5
    assert 0 < own < 0.75 * plain
    assert 0.7 < float((error / scale).median()) < 1.4


@pytest.mark.parametrize("activation", ["softplus", "exp"])
def test_the_spread_scales_only_the_number_dimensions(activation):
    network = AbductionNetwork(6, 8, scale_activation=activation, number_dims=2)
    network.scale_net.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    z = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    plain = network(torch.cat([z, torch.zeros(5, 3)], 1))
    beside = torch.tensor([[0.25, 0.5, 1.0]]).expand(5, 3)
    moved = network(torch.cat([z, beside], 1))
    for a, b in zip(plain, moved, strict=True):
        assert torch.equal(a[:, :6], b[:, :6])
    assert_close(moved.loc[:, 6:], plain.loc[:, 6:] + 0.75, 1e-6)
    assert_close(moved.scale[:, 6:], plain.scale[:, 6:] * math.e, 1e-5)  # but for the floor of 1e-6


COUNT = 512
LINES = [3, 4, NUM, 0, 5, 6, NUM, 0, 7]  # two named numbers, and what is to be said of them


def rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    values = torch.zeros(count, len(LINES), dtype=torch.float64)
    values[:, [2, 6]] = torch.randn(count, 2, generator=draw, dtype=torch.float64)
    return torch.tensor([LINES] * count), values


def truth_of(values: torch.Tensor) -> torch.Tensor:
    """Of no use to a linear reading: the two numbers act together."""
    return 3.0 * phi(values[:, 2]).double() * phi(values[:, 6]).double()


def part_of(random_features: int) -> WidePart:
    part = WidePart(BUCKETS, NUM, VOCAB, random_features).eval()
    part.line_end.data[0] = 1.0
    return part


def fitted(
    count: int, random_features: int = COUNT, y=None, values=None
) -> tuple[WidePart, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A part fitted to rows; their ids, values and g as left out."""
    part, (ids, drawn) = part_of(random_features), rows(count)
    values = drawn if values is None else values
    y = truth_of(values) if y is None else y
    at = torch.arange(count) * len(LINES) + len(LINES) - 1
    found = fit_wide(texts_before(part, batch_of(ids, values, y), at), y, BUCKETS, random_features)
    for name, table in found.tables.items():
        part.get_parameter(name).data.copy_(table)
    return part, ids, values, found.left_out


@pytest.mark.parametrize("law", ["normal", "laplace"])
def test_products_of_random_features_equal_the_kernel(law):
    """Within four standard deviations of a mean of 20,000 cosines."""
    part, (ids, values) = part_of(0), rows(60)
    texts = texts_before(part, batch_of(ids, values, values[:, 2]), torch.arange(60) * len(LINES) + len(LINES) - 1)
    candidates = list(NamedRows.of(texts).random(20_000))
    found = candidates[1 if law == "normal" else 1 + len(WIDTHS)]
    held = phi(values[:, [2, 6]]).double().numpy()
    x = (held - held.mean(0)) / held.std(0)
    distance = np.abs(x[:, None] - x[None]) / (WIDTHS[1] * np.sqrt(2.0))
    kernel = np.exp(-np.square(distance).sum(-1) / 2) if law == "normal" else np.prod(1 / (1 + distance**2), -1)
    assert np.abs(found.x @ found.x.T - kernel).max() < 4 / np.sqrt(20_000) * 1.25


def test_an_interaction_of_two_numbers_is_learnt():
    part, ids, values, left_out = fitted(100)
    y = truth_of(values)
    assert (left_out - y).abs().mean() < 0.25 * (y - y.median()).abs().mean()
    assert_close(part.train()(ids, values)[0][0, :, -1], left_out.float(), 1e-4)
    new, new_values = rows(200, seed=4)
    truth = truth_of(new_values)
    error = (part.eval()(new, new_values)[0][0, :, -1] + y.median() - truth).abs().mean()
    assert error < 0.2 * (truth - y.median()).abs().mean()


@pytest.mark.parametrize("random_features", [0, COUNT])
def test_outliers_are_limited(random_features):
    """Years near 2000 and one cell of 0: without a limit it was worth some thousand standard deviations."""
    ids, values = rows(100)
    values[:, 2] = 2000 + (values[:, 2] * 5).round()
    y = 400 * (values[:, 2] - 2000) / 2000
    part = part_of(random_features)
    at = torch.arange(100) * len(LINES) + len(LINES) - 1
    found = fit_wide(texts_before(part, batch_of(ids, values, y), at), y, BUCKETS, random_features)
    for name, table in found.tables.items():
        part.get_parameter(name).data.copy_(table)
    values[:2, 2] = torch.tensor([0.0, -1e30])
    g = part(ids, values)[0][0, :, -1]
    assert (g[0] - g[1]).abs() < 0.1 * y.std()  # as words they differ
    assert g.abs().max() < 2 * FAR * y.std()


def test_sums_are_nearly_exact():
    """Sums of numbers below a million are linear in values, not in their logarithms. What is left is fp32: without the
    values the median error is some 2,000. An intercept is left to what reads the wide part."""
    ids, _ = rows(200)
    values = torch.zeros(200, len(LINES), dtype=torch.float64)
    values[:, [2, 6]] = torch.randint(0, 1_000_000, (200, 2), generator=torch.Generator().manual_seed(0)).double()
    y = values[:, 2] + values[:, 6]
    part, ids, _, left_out = fitted(200, COUNT, y, values)
    middle = (y - left_out).quantile(0.5)
    left = (left_out + middle - y).abs()
    assert left.median() < 0.1
    assert left.max() < 5.0
    error = (part(ids, values)[0][0, :, -1].double() + middle - y).abs()
    assert error.median() < 0.5
    assert error.max() < 5.0


def test_a_value_whose_square_overflows_is_limited():
    part, ids, values, _ = fitted(100)
    values[0, 2], values[1, 2] = 1e308, -1e308
    assert part(ids, values)[0].isfinite().all()
    texts = texts_before(part, batch_of(ids, values, values[:, 6]), torch.arange(100) * 9 + 8)
    assert np.isfinite(NamedRows.of(texts).raw).all()
