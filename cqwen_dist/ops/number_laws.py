"""Other laws of a number: Laplace's and Student's t, with a location and a scale as a Cauchy has them.

U stays Cauchy, since sums of these laws are of another kind. Only a number Y has one, with the location and the scale
that the closed form gives (docs/decisions.md, D45). A t with one degree of freedom is the Cauchy.
"""

import math
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy

HALVINGS = 55  # of an angle: what float64 resolves


class SymmetricLaw(Cauchy):
    """A law about `loc` that its sums do not have. scale > 0; r is a distance in scales, P(|X - loc| < r scale) is
    `inside`, and `reach` its inverse."""

    inside: Any
    reach: Any

    def sf(self, c: Tensor | float) -> Tensor:
        r = (c - self.loc) / self.scale
        return (1.0 - r.sign() * self.inside(r.abs())) / 2.0

    def cdf(self, c: Tensor | float) -> Tensor:
        return self._replace(loc=-self.loc).sf(-c)

    def log_sf(self, c: Tensor | float) -> Tensor:
        return self.sf(c).log()

    def log_cdf(self, c: Tensor | float) -> Tensor:
        return self.cdf(c).log()

    def quantile(self, p: Tensor | float) -> Tensor:
        p = torch.as_tensor(p, dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + self.scale * (p - 0.5).sign() * self.reach((2.0 * p - 1.0).abs())

    def affine(self, weight: Tensor, bias: Tensor | None = None) -> Cauchy:
        raise TypeError("a linear map of Cauchy variables only has a closed form")

    def kl(self, other: Cauchy, unit: Tensor | float | None = None) -> Tensor:
        raise TypeError("the KL of Cauchy laws only has a closed form")


class Laplace(SymmetricLaw):
    """exp(-|r|) / (2 scale)."""

    @staticmethod
    def inside(r: Tensor) -> Tensor:
        return -torch.expm1(-r)

    @staticmethod
    def reach(level: Tensor) -> Tensor:
        return -torch.log1p(-level)

    @staticmethod
    def half_width(level: float) -> float:
        return -math.log1p(-level)

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
    def within(cls, a: Any, sin: Any, cos: Any) -> Any:
        """P(|X - loc| < sqrt n tan(a) scale), of tensors or floats."""
        total = 1.0
        for k in range(cls.freedom - 2, 1, -2):
            total = 1.0 + (k - 1) / k * cos * cos * total
        if cls.freedom % 2 == 0:
            return sin * total
        return 2.0 / math.pi * (a + (sin * cos * total if cls.freedom > 1 else 0.0))

    @classmethod
    def inside(cls, r: Tensor) -> Tensor:
        a = torch.atan(r / math.sqrt(cls.freedom))
        return cls.within(a, a.sin(), a.cos())

    @classmethod
    def reach(cls, level: Tensor) -> Tensor:
        low, step = torch.zeros_like(level, dtype=torch.float64), math.pi / 2
        for _ in range(HALVINGS):
            step /= 2
            a = low + step
            low = torch.where(cls.within(a, a.sin(), a.cos()) <= level, a, low)
        return (math.sqrt(cls.freedom) * low.tan()).to(level.dtype)

    @classmethod
    def half_width(cls, level: float) -> float:
        low, step = 0.0, math.pi / 2
        for _ in range(HALVINGS):
            step /= 2
            low += step if cls.within(low + step, math.sin(low + step), math.cos(low + step)) <= level else 0.0
        return math.sqrt(cls.freedom) * math.tan(low)

    @classmethod
    def density_at_0(cls) -> float:
        n = cls.freedom
        return math.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2)) / math.sqrt(n * math.pi)

    def nll(self, x: Tensor | float) -> Tensor:
        root = math.sqrt(self.freedom)
        spread = torch.hypot(torch.full_like(self.scale, root), (x - self.loc) / self.scale) / root
        return self.scale.log() - math.log(self.density_at_0()) + (self.freedom + 1) * spread.log()

    def crps(self, x: Tensor | float) -> Tensor:
        """Jordan, Krueger and Lerch 2019, "Evaluating Probabilistic Forecasts with scoringRules"; n > 1."""
        n, gap = self.freedom, (x - self.loc).abs()
        a = torch.atan2(gap, math.sqrt(n) * self.scale)
        beta = [math.lgamma(p) + math.lgamma(q) - math.lgamma(p + q) for p, q in ((0.5, n - 0.5), (0.5, n / 2))]
        at_0 = 2.0 * math.sqrt(n) / (n - 1) * math.exp(beta[0] - 2 * beta[1])
        tail = 2.0 * n / (n - 1) * self.density_at_0() * a.cos() ** (n - 1)
        return gap * self.within(a, a.sin(), a.cos()) + self.scale * (tail - at_0)


FREEDOMS = (2, 3, 4, 5, 6, 8, 10, 15, 20, 30)
LAWS: dict[str, type[Cauchy]] = {  # by name; a t's with its degrees of freedom
    "cauchy": Cauchy,
    "laplace": Laplace,
    **{f"student-{n}": type("Student", (Student,), {"freedom": n}) for n in FREEDOMS},
}
