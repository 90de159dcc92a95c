"""The Cauchy law against scipy, numeric integration, sampling and finite differences."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from scipy.integrate import quad
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy, cdf_given_sum, log_prob_above, quantile_given_sum

Z = torch.cat([-torch.logspace(9, -9, 200), torch.zeros(1), torch.logspace(-9, 9, 200)]).double()
SCALES = [1e-9, 1e-6, 1e-3, 1.0, 10.0, 1e3]


def pair(c=5, n=3, seed=0):
    make = torch.Generator().manual_seed(seed)
    loc = torch.randn(n, c, dtype=torch.float64, generator=make)
    scale = torch.rand(n, c, dtype=torch.float64, generator=make) + 0.1
    return loc.requires_grad_(), scale.requires_grad_()


def exact_log_above(z: np.ndarray) -> np.ndarray:
    """log P(X > c) in float64 at c = loc + z scale, from scipy, whose tails are stable."""
    return np.where(z > 0, scipy.stats.cauchy.logsf(z), np.log1p(-scipy.stats.cauchy.sf(-z)))


@pytest.mark.parametrize("scale", SCALES)
def test_fp32_logarithms_keep_their_relative_precision(scale):
    s = torch.full_like(Z, scale).float()
    loc = (-Z * scale).float()
    z = (-loc.double() / s.double()).numpy()  # as fp32 has it
    law = Cauchy(loc, s)
    for got, exact in ((law.log_sf(0.0), exact_log_above(z)), (law.log_cdf(0.0), exact_log_above(-z))):
        np.testing.assert_allclose(got.double().numpy(), exact, rtol=1e-6)
    np.testing.assert_allclose(law.sf(0.0).double().numpy(), np.exp(exact_log_above(z)), rtol=2e-6)
    np.testing.assert_allclose(law.cdf(0.0).double().numpy(), np.exp(exact_log_above(-z)), rtol=2e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_fp32_gradients_are_the_closed_form(scale):
    s = torch.full_like(Z, scale).float().requires_grad_()
    d = (Z * scale).float().requires_grad_()
    log_prob_above(s, d).sum().backward()
    s64, d64 = s.detach().double(), d.detach().double()
    q, above = s64**2 + d64**2, torch.atan2(s64, d64)  # pi P
    torch.testing.assert_close(d.grad.double(), -s64 / (q * above), rtol=2e-6, atol=0)
    torch.testing.assert_close(s.grad.double(), d64 / (q * above), rtol=2e-6, atol=0)


def test_the_seeds_formula_is_inexact_where_this_is_exact():
    z = torch.tensor(-48363.0)  # the optimum of a uniform guess over 151,936 words (P = 1/V)
    seed = 0.5 + torch.atan(z) / math.pi
    exact = scipy.stats.cauchy.sf(48363.0)
    assert abs(seed.item() / exact - 1) > 1e-3
    assert abs(Cauchy(z, torch.tensor(1.0)).sf(0.0).item() / exact - 1) < 1e-6


def test_scale_zero_is_a_point_mass():
    law = Cauchy(torch.tensor([-1.0, 0.0, 1.0]), torch.zeros(3))
    assert law.sf(0.0).tolist() == [0.0, 0.5, 1.0]
    assert law.cdf(0.0).tolist() == [1.0, 0.5, 0.0]
    assert law.log_sf(0.0).tolist() == [-math.inf, pytest.approx(-math.log(2)), 0.0]
    loc = torch.tensor([0.5, 1.0], requires_grad=True)
    scale = torch.zeros(2, requires_grad=True)
    Cauchy(loc, scale).log_sf(0.0).sum().backward()
    assert loc.grad.tolist() == [0.0, 0.0]
    torch.testing.assert_close(scale.grad, torch.tensor([-2.0, -1.0]) / math.pi)  # -1/(pi |d|)


@pytest.mark.parametrize("name", ["log_sf", "log_cdf", "sf", "cdf", "nll"])
def test_gradients_equal_finite_differences(name):
    loc, scale = pair()
    x = torch.linspace(-2, 2, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda m, g: getattr(Cauchy(m, g), name)(x), (loc, scale))


def test_gradients_of_affine_kl_quantile_and_sample():
    loc, scale = pair()
    weight = torch.randn(4, 5, dtype=torch.float64).requires_grad_()
    bias = torch.randn(4, dtype=torch.float64).requires_grad_()
    p = torch.tensor([0.01, 0.2, 0.5, 0.7, 0.97], dtype=torch.float64).requires_grad_()
    other = Cauchy(*(t.detach() for t in pair(seed=1)))
    assert torch.autograd.gradcheck(lambda m, g, w, b: Cauchy(m, g).affine(w, b), (loc, scale, weight, bias))
    assert torch.autograd.gradcheck(lambda m, g, w: Cauchy(m, g).affine(w), (loc, scale, weight[0].detach()))
    assert torch.autograd.gradcheck(lambda m, g: Cauchy(m, g).kl(other), (loc, scale))
    assert torch.autograd.gradcheck(lambda m, g, p: Cauchy(m, g).quantile(p), (loc, scale, p))


def test_nll_does_not_overflow():
    loc = torch.zeros(1, requires_grad=True)
    scale = torch.full((1,), 48.0, requires_grad=True)
    nll = Cauchy(loc, scale).nll(torch.tensor([1e25]))
    nll.sum().backward()
    exact = math.log(math.pi * 48) + 2 * math.log(1e25 / 48)
    assert nll.item() == pytest.approx(exact, rel=1e-6)
    assert scale.grad.item() == pytest.approx(-1 / 48)
    assert torch.isfinite(loc.grad).all()


def test_quantile_inverts_cdf_and_is_precise_at_the_ends():
    law = Cauchy(torch.tensor(2.0, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64))
    p = torch.cat([torch.logspace(-12, -0.4, 50), 1 - torch.logspace(-9, -0.4, 50), torch.tensor([0.5])]).double()
    torch.testing.assert_close(law.cdf(law.quantile(p)), p, rtol=1e-9, atol=0)
    assert law.quantile(0.5).item() == 2.0
    assert law.quantile(0.95).item() == pytest.approx(2.0 + 0.5 * 6.313752, rel=1e-6)
    unit = Cauchy(torch.zeros(()), torch.ones(()))
    assert unit.quantile(1e-7).item() == pytest.approx(-1 / (math.pi * 1e-7), rel=1e-5)


def test_sample_is_finite_at_the_ends_and_follows_the_law():
    unit = Cauchy(torch.zeros(2), torch.ones(2))
    assert torch.isfinite(unit.sample(torch.tensor([0.0, 1.0]))).all()
    make = torch.Generator().manual_seed(0)
    law = Cauchy(torch.tensor(-1.0), torch.tensor(2.0))
    draws = law.sample(torch.rand(100_000, generator=make))
    assert scipy.stats.kstest(draws.numpy(), scipy.stats.cauchy(-1, 2).cdf).pvalue > 0.01


def test_affine_map_is_the_law_of_the_weighted_sum():
    """sum w_j X_j + b ~ Cauchy(sum w_j mu_j + b, sum |w_j| gamma_j), checked by drawing X (S3 2.4)."""
    make = torch.Generator().manual_seed(3)
    loc, scale = torch.randn(6, generator=make), torch.rand(6, generator=make)
    weight, bias = torch.randn(3, 6, generator=make), torch.randn(3, generator=make)
    draws = Cauchy(loc, scale).sample(torch.rand(50_000, 6, generator=make)) @ weight.T + bias
    law = Cauchy(loc, scale).affine(weight, bias)
    for k in range(3):
        exact = scipy.stats.cauchy(law.loc[k].item(), law.scale[k].item())
        assert scipy.stats.kstest(draws[:, k].numpy(), exact.cdf).pvalue > 0.01
    single = Cauchy(loc, scale).affine(weight[1], bias[1])
    torch.testing.assert_close(torch.stack(single), torch.stack([law.loc[1], law.scale[1]]))


def test_kl_equals_the_integral_is_symmetric_and_zero_for_equal_laws():
    a = Cauchy(torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64))
    b = Cauchy(torch.tensor(-1.0, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64))
    p, q = scipy.stats.cauchy(0.3, 0.7), scipy.stats.cauchy(-1.0, 2.0)
    integral, _ = scipy.integrate.quad(lambda x: p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), -np.inf, np.inf)
    assert a.kl(b).item() == pytest.approx(integral, rel=1e-6)
    assert a.kl(b).item() == pytest.approx(b.kl(a).item(), rel=1e-12)
    assert a.kl(a).item() == 0.0
    near = Cauchy(a.loc + 1e-6, a.scale)
    assert a.kl(near).item() == pytest.approx((1e-6 / 0.7) ** 2 / 4, rel=1e-6)


@pytest.mark.parametrize(
    ("loc", "scale", "x"), [(0.0, 1.0, 0.0), (1.0, 0.5, 3.0), (-2.0, 1e-3, 40.0), (5.0, 30.0, 4.0)]
)
def test_crps_is_the_integral_of_the_squared_difference(loc: float, scale: float, x: float) -> None:
    """By quadrature over t = loc + scale tan(phi); finite, though a Cauchy has no mean."""
    from scipy.integrate import quad

    def squared(phi: float) -> float:
        t, below = loc + scale * math.tan(phi), 0.5 + phi / math.pi
        return (below - (t >= x)) ** 2 * scale / math.cos(phi) ** 2

    jump = math.atan((x - loc) / scale)
    expected = quad(squared, -math.pi / 2, jump)[0] + quad(squared, jump, math.pi / 2)[0]
    law = Cauchy(torch.tensor(loc, dtype=torch.float64), torch.tensor(scale, dtype=torch.float64))
    assert float(law.crps(x)) == pytest.approx(expected, rel=1e-6)
    single = Cauchy(torch.tensor(loc), torch.tensor(scale))
    assert float(single.crps(x)) == pytest.approx(expected, rel=1e-5)
    assert float(Cauchy(law.loc, torch.zeros(()).double()).crps(x)) == pytest.approx(abs(x - loc))


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
