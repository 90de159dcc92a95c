"""Laplace's law and Student's t against scipy, and their gradients by finite differences, all in float64."""

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from support.numerics import assert_close

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.number_laws import LAWS
from cqwen_dist.ops.regression import GATES

OTHERS = [name for name in LAWS if name != "cauchy"]
LOC, SCALE = (torch.tensor(value, dtype=torch.float64) for value in (0.7, 1.3))
X = torch.linspace(-40, 40, 41, dtype=torch.float64)


def of_scipy(name: str):
    kind, _, n = name.partition("-")
    return scipy.stats.laplace(LOC, SCALE) if kind == "laplace" else scipy.stats.t(int(n), LOC, SCALE)


@pytest.mark.parametrize("name", OTHERS)
def test_density_distribution_and_quantiles_are_scipys(name):
    law, known = LAWS[name](LOC, SCALE), of_scipy(name)
    for found, wanted in ((-law.nll(X), known.logpdf(X)), (law.cdf(X), known.cdf(X)), (law.sf(X), known.sf(X))):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-15)
    p = torch.tensor([1e-6, 0.01, 0.3, 0.5, 0.77, 1 - 1e-6], dtype=torch.float64)
    np.testing.assert_allclose(law.quantile(p), known.ppf(p), rtol=1e-8)
    assert_close(law.sample(p), law.quantile(p), 1e-12)
    for level in (0.05, 0.5, 0.9, 0.95):
        assert law.half_width(level) == pytest.approx((known.ppf(0.5 + level / 2) - 0.7) / 1.3, rel=1e-9)


@pytest.mark.parametrize("name", OTHERS)
def test_the_crps_is_the_integral(name):
    law, known = LAWS[name](LOC, SCALE), of_scipy(name)
    for x in (-5.0, 0.7, 3.0):
        under = scipy.integrate.quad(lambda t: known.cdf(t) ** 2, -np.inf, x)[0]
        over = scipy.integrate.quad(lambda t: known.sf(t) ** 2, x, np.inf)[0]
        assert float(law.crps(torch.tensor(x, dtype=torch.float64))) == pytest.approx(under + over, abs=1e-7)


@pytest.mark.parametrize("name", ["laplace", "student-2", "student-5"])
def test_gradients_are_finite_differences(name):
    loc, scale = LOC.expand(5).clone().requires_grad_(), SCALE.expand(5).clone().requires_grad_()
    x = torch.tensor([-3.0, 0.2, 0.9, 4.0, 60.0], dtype=torch.float64)
    for found in ("nll", "crps"):
        assert torch.autograd.gradcheck(lambda a, b, found=found: getattr(LAWS[name](a, b), found)(x), (loc, scale))
    eps = torch.tensor([1e-4, 0.2, 0.5, 0.8, 0.99], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: LAWS[name](a, b).sample(eps), (loc, scale))


@pytest.mark.parametrize("name", OTHERS)
def test_single_precision_is_near_and_finite_far_out(name):
    x = torch.tensor([-1e30, -1e4, 0.0, 0.7, 1.0, 1e30])
    loc, scale = (part.float().expand(6).clone().requires_grad_() for part in (LOC, SCALE))
    nll = LAWS[name](loc, scale).nll(x)
    torch.testing.assert_close(nll, LAWS[name](LOC, SCALE).nll(x.double()).float(), rtol=1e-5, atol=1e-5)
    nll.sum().backward()
    assert bool(loc.grad.isfinite().all() & scale.grad.isfinite().all())


@pytest.mark.parametrize("name", ["laplace", "student-4"])
def test_a_law_stays_itself_and_claims_no_closed_form_it_lacks(name):
    law = LAWS[name](torch.randn(3), torch.ones(3))
    assert type(law.to(torch.float64)) is type(law._replace(loc=law.loc + 1)) is LAWS[name]
    for lacking in (lambda: law.affine(torch.ones(3)), lambda: law.kl(law), lambda: law.log_sf(0.0)):
        with pytest.raises(TypeError, match="Cauchy"):
            lacking()
    compiled = torch.compile(lambda loc, x: LAWS[name](loc, loc.abs() + 1).nll(x), backend="eager", fullgraph=True)
    assert_close(compiled(law.loc, X[:3].float()), LAWS[name](law.loc, law.loc.abs() + 1).nll(X[:3].float()), 1e-6)


def test_many_degrees_of_freedom_approach_the_normal_and_one_is_the_cauchy():
    one = type("Student", (LAWS["student-2"],), {"freedom": 1})(LOC, SCALE)
    cauchy = Cauchy(LOC, SCALE)
    for found, wanted in ((one.nll(X), cauchy.nll(X)), (one.cdf(X), cauchy.cdf(X))):
        assert_close(found, wanted, 1e-12)
    assert one.half_width(0.9) == pytest.approx(cauchy.half_width(0.9), rel=1e-12)
    known = scipy.stats.norm(0.7, 1.3)
    assert float(LAWS["student-30"](LOC, SCALE).cdf(X[22])) == pytest.approx(known.cdf(float(X[22])), abs=0.01)


MASK = torch.tensor([True, False, True])
P = torch.tensor([0.9, 0.4, 0.2])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_gates_equal_their_formulas(alpha):
    m = MASK.float()
    torch.testing.assert_close(GATES["alpha"](MASK, P, alpha), m * (alpha + (1 - alpha) * P))
    torch.testing.assert_close(GATES["soft"](MASK, P, alpha), (alpha + (1 - alpha) * m) * P)
    torch.testing.assert_close(GATES["hard"](MASK, P, alpha), m * P)


def test_regression_gradient_scales_with_p_num_and_only_at_numbers():
    loc = torch.zeros(3, requires_grad=True)
    nll = Cauchy(loc, torch.ones(3)).nll(torch.full((3,), 2.0))
    (GATES["alpha"](MASK, P, 0.0) * nll).sum().backward()
    plain = -2 * 2.0 / (1 + 4.0)
    torch.testing.assert_close(loc.grad, plain * P * MASK)
