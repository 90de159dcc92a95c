"""Numbers by their names: the kernels of random features, sums over a text in pieces, the fit, its limits."""

import numpy as np
import pytest
import torch
from support.numerics import assert_close
from support.tiny import NUM, VOCAB
from tables.test_wide import BUCKETS, batch_of

from cqwen_dist.model.embedding import phi
from cqwen_dist.tables.wide.wide_part import FAR, WidePart
from cqwen_dist.tables.wide.wide_rows import WIDTHS, NamedRows, texts_before
from cqwen_dist.tables.wide.wide_start import fit_wide

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
