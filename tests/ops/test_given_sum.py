"""A sum of Cauchy variables given another: against quadrature, draws, and the cases in which it is known."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from torch import Tensor

from cqwen_dist.ops.given_sum import cdf_given_sum, quantile_given_sum

SPLIT = torch.tensor([0.2, 0.3, 0.5, 0.0], dtype=torch.float64)


def given(*numbers: float) -> list[Tensor]:
    return [torch.tensor([number], dtype=torch.float64) for number in numbers]


def density(x: float, scale: float) -> float:
    return scale / math.pi / (scale * scale + x * x)


@pytest.mark.parametrize(
    ("x", "r", "a", "k", "n", "m"),
    [
        (1.0, 2.0, 1.0, 1.5, 0.3, 0.3),
        (0.0, 0.0, 1.0, 1.0, 1.0, 1.0),
        (0.4, 0.0, 0.5, 2.0, 0.5, 0.1),  # p is 0 between two kinks
        (5.0, 12.0, 0.7, 2.0, 0.05, 0.05),
        (-3.0, 2.0, 0.5, 0.2, 0.5, 0.7),
    ],
)
def test_one_cause_is_as_quadrature_has_it(x: float, r: float, a: float, k: float, n: float, m: float) -> None:
    """r = A + N, x = k A + N': the posterior of A is f_a(A) f_n(r - A) / f_(a+n)(r). A is a sum over dimensions."""

    def both(angle: float) -> float:
        one = math.tan(angle)
        above = 0.5 + math.atan((x - k * one) / m) / math.pi
        return density(one, a) * density(r - one, n) * above / math.cos(angle) ** 2

    kinks = sorted({math.atan(r), 0.0, math.atan(x / k)})
    total = quad(both, -math.pi / 2, math.pi / 2, points=kinks, limit=2000, epsabs=1e-13)[0]
    x_, r_, n_, m_ = given(x, r, n, m)
    found = cdf_given_sum(x_, r_, a * SPLIT[None], a * k * SPLIT[None], n_, m_)
    assert float(found) == pytest.approx(total / density(r, a + n), abs=1e-9)


def test_causes_whose_scales_change_differently_are_as_draws_have_them() -> None:
    """200,000 individuals, each weighted by the density of the noise that the rest of r would be."""
    c, d, r, n, m = np.array([1.0, 0.3, 0.1]), np.array([0.2, 0.9, 0.0]), 1.5, 0.4, 0.3
    tau = np.random.default_rng(0).standard_cauchy((200_000, 3))
    weight = 1 / (n * n + (r - tau @ c) ** 2)
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    drawn = [np.average(0.5 + np.arctan((float(at) - tau @ d) / m) / math.pi, weights=weight) for at in x]
    r_, n_, m_ = given(r, n, m)
    found = cdf_given_sum(x, r_, torch.tensor(c)[None], torch.tensor(d)[None], n_, m_)
    assert found.numpy() == pytest.approx(np.array(drawn), abs=1e-2)


def test_quantiles_invert_the_distribution_also_far_out() -> None:
    levels = torch.tensor([1e-4, 0.05, 0.5, 0.95, 0.9999], dtype=torch.float64)
    c, d = torch.tensor([[0.7, 0.2], [1.0, 0.0]]), torch.tensor([[0.1, 0.9], [2.0, 0.0]])
    r, n, m = torch.tensor([3.0, -40.0]), torch.tensor([0.1, 0.5]), torch.tensor([0.1, 0.2])
    x = quantile_given_sum(levels, r, c, d, n, m)
    wide = [part.double().unsqueeze(1) for part in (r, c, d, n, m)]
    assert torch.allclose(cdf_given_sum(x, *wide), levels.expand(2, -1), atol=1e-10)


def test_without_noise_the_same_scales_give_r_and_twice_these_give_twice_r() -> None:
    levels, (r, zero) = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64), given(-3.0, 0.0)
    for k in (1.0, 2.0):
        x = quantile_given_sum(levels, r, SPLIT[None], k * SPLIT[None], zero, zero)
        assert torch.allclose(x, k * r.expand(1, 3), rtol=1e-6)


def test_a_sum_that_shares_no_cause_keeps_its_law() -> None:
    levels, (r, n, m) = torch.tensor([0.05, 0.25, 0.5, 0.95], dtype=torch.float64), given(7.0, 0.1, 0.5)
    c, d = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.5]])
    x = quantile_given_sum(levels, r, c, d, n, m)
    assert torch.allclose(x[0], 2.0 * torch.tan(math.pi * (levels - 0.5)), atol=1e-9)
