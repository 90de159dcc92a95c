"""Other laws of a number: Laplace's and Student's t, with a location and a scale as a Cauchy has them.

U stays Cauchy, since sums of these laws are no such laws. Only a number Y has one, with the location and the scale that
the closed form gives (docs/decisions.md, D45). A t with one degree of freedom is the Cauchy.
"""

import math
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy

HALVINGS = 55  # of an angle: what float64 resolves


def _only_cauchy(*args: Any) -> Any:
    raise TypeError("a closed form of Cauchy laws only")  # rather than the Cauchy's answer


ONLY_CAUCHY: Any = _only_cauchy


class SymmetricLaw(Cauchy):
    """A law about `loc` that its sums do not have. scale > 0; r is a distance in scales, P(|X - loc| < r scale) is
    `inside`, and `reach` its inverse, of tensors or, with `of` math, of floats."""

    inside: Any
    reach: Any

    def cdf(self, c: Tensor | float) -> Tensor:
        r = (c - self.loc) / self.scale
        return (1.0 + r.sign() * self.inside(r.abs())) / 2.0

    def sf(self, c: Tensor | float) -> Tensor:
        return self._replace(loc=-self.loc).cdf(-c)

    def quantile(self, p: Tensor | float) -> Tensor:
        p = torch.as_tensor(p, dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + self.scale * (p - 0.5).sign() * self.reach((2.0 * p - 1.0).abs())

    @classmethod
    def half_width(cls, level: float) -> float:
        return float(cls.reach(level, math))

    affine = kl = log_sf = log_cdf = ONLY_CAUCHY


class Laplace(SymmetricLaw):
    """exp(-|r|) / (2 scale)."""

    @staticmethod
    def inside(r: Tensor) -> Tensor:
        return -torch.expm1(-r)

    @staticmethod
    def reach(level: Any, of: Any = torch) -> Any:
        return -of.log1p(-level)

    def nll(self, x: Tensor | float) -> Tensor:
        return math.log(2.0) + self.scale.log() + (x - self.loc).abs() / self.scale

    def crps(self, x: Tensor | float) -> Tensor:
        gap = (x - self.loc).abs()
        return gap + self.scale * (torch.exp(-gap / self.scale) - 0.75)


class Student(SymmetricLaw):
    """Student's t with n = `freedom` degrees of freedom, a whole number: so that its distribution function is a finite
    sum in the angle a = atan(r / sqrt n) (Abramowitz and Stegun 26.7.3, 26.7.4)."""

    freedom = 4

    @classmethod
    def within(cls, a: Any, of: Any = torch) -> Any:
        """P(|X - loc| < sqrt n tan(a) scale)."""
        total, sin, cos = 1.0, of.sin(a), of.cos(a)
        for k in range(cls.freedom - 2, 1, -2):
            total = 1.0 + (k - 1) / k * cos * cos * total
        if cls.freedom % 2 == 0:
            return sin * total
        return 2.0 / math.pi * (a + (sin * cos * total if cls.freedom > 1 else 0.0))

    @classmethod
    def inside(cls, r: Tensor) -> Tensor:
        return cls.within(torch.atan(r / math.sqrt(cls.freedom)))

    @classmethod
    def reach(cls, level: Any, of: Any = torch) -> Any:
        low, step = 0.0 * level, math.pi / 2
        for _ in range(HALVINGS):
            step /= 2
            low = low + step * (cls.within(low + step, of) <= level)
        return math.sqrt(cls.freedom) * of.tan(low)

    def nll(self, x: Tensor | float) -> Tensor:
        n, root = self.freedom, math.sqrt(self.freedom)
        spread = torch.hypot(torch.full_like(self.scale, root), (x - self.loc) / self.scale) / root
        return self.scale.log() + (n + 1) * spread.log() + math.log(root) + _log_beta(0.5, n / 2)

    def crps(self, x: Tensor | float) -> Tensor:
        """Jordan, Krueger and Lerch 2019, "Evaluating Probabilistic Forecasts with scoringRules"; n > 1."""
        n, root, gap = self.freedom, math.sqrt(self.freedom), (x - self.loc).abs()
        a, beta = torch.atan2(gap, root * self.scale), math.exp(-_log_beta(0.5, n / 2))
        beyond = a.cos() ** (n - 1) - math.exp(_log_beta(0.5, n - 0.5)) * beta
        return gap * self.within(a) + self.scale * 2.0 * root / (n - 1) * beta * beyond


def _log_beta(p: float, q: float) -> float:
    return math.lgamma(p) + math.lgamma(q) - math.lgamma(p + q)


# By name; a t's with its degrees of freedom.
LAWS: dict[str, type[Cauchy]] = {
    "cauchy": Cauchy,
    "laplace": Laplace,
    **{f"student-{n}": type("Student", (Student,), {"freedom": n}) for n in (2, 3, 4, 5, 6, 8, 10, 15, 20, 30)},
}
