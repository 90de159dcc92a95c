"""Other laws of a number: Laplace's and Student's t, with a location and a scale as a Cauchy has them; and which law
some errors have.

U stays Cauchy, since sums of these laws are no such laws. Only a number Y has one, with the location and the scale that
the closed form gives (docs/decisions.md, D45). A t with one degree of freedom is the Cauchy.
"""

import math
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy

HALVINGS = 55  # of an angle: what float64 resolves
LEAST = 40  # errors: fewer tell no laws apart
TURNS = 60  # of a scale's fixed point: then it moves by less than 1e-6


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


class FittedLaw(NamedTuple):
    """A law by name, and its scale in the errors' unit."""

    name: str
    scale: float
    crps: dict[str, float]  # of the laws tried (the best t of all), held out; without a choice none

    @property
    def said(self) -> str:
        """The law and why: "laplace, with the least CRPS on rows left out (student-4 +0.3%)"."""
        others = sorted((of, name) for name, of in self.crps.items() if name != self.name)
        more = ", ".join(f"{name} {of / self.crps[self.name] - 1:+.1%}" for of, name in others)
        return f"{self.name}, with the least CRPS on rows left out ({more})" if more else self.name


def fit_law(asked: str, error: Tensor, h: Tensor, folds: Tensor) -> FittedLaw:
    """The law of least CRPS among those asked for: a name in `LAWS`, "student" (any freedom) or "auto" (any law).

    error, h [n] float64: e_i has the law with scale exp(h_i) times one constant. For the figures it is the likeliest
    for the other folds [n], for the result for all. With fewer than `LEAST` errors auto is the Cauchy, and student a t
    with 4.
    """
    names = [name for name in LAWS if asked in ("auto", name, name.partition("-")[0])]
    if len(names) > 1 and (len(error) < LEAST or bool((folds == folds[0]).all())):
        names = ["cauchy" if asked == "auto" else "student-4"]
    spread, crps = h.exp(), dict.fromkeys(names, 0.0)
    for fold, name in product(folds.unique(), names if len(names) > 1 else ()):
        own = folds == fold
        law = _fitted(LAWS[name], (error / spread)[~own], spread[own])
        crps[name] += float(law.crps(error[own]).sum()) / len(error)
    ranked = sorted(names, key=lambda name: crps[name])
    others = [name for name in ranked if name.startswith("student")][1:]
    scale = float(_fitted(LAWS[ranked[0]], error / spread, torch.ones_like(spread[:1])).scale)
    return FittedLaw(ranked[0], scale, {n: crps[n] for n in ranked if n not in others} if len(names) > 1 else {})


def _fitted(law: type[Cauchy], r: Tensor, spread: Tensor) -> Cauchy:
    """The law about 0 with the scale that is likeliest for errors r [n], times spread [m]."""
    least, n = 1e-9 * float(r.abs().max()) + 1e-30, getattr(law, "freedom", 1)
    scale = (r.abs().mean() if law is Laplace else r.abs().median()).clamp(min=least)
    turns = 0 if law is Laplace else TURNS  # of a t's weights, by expectation and maximisation (Lange et al. 1989)
    for _ in range(turns):
        scale = ((n + 1) / (n + (r / scale).square()) * r.square()).mean().sqrt().clamp(min=least)
    return law(torch.zeros_like(spread), scale * spread)
