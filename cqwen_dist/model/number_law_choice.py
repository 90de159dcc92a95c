"""Which law the errors of the closed form have: the one of least CRPS on folds left out."""

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.number_laws import LAWS, Laplace

LEAST = 40  # errors: fewer tell no laws apart
TURNS = 60  # of a scale's fixed point: then it moves by less than 1e-6


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
    for _ in range(
        0 if law is Laplace else TURNS
    ):  # a t's weights, by expectation and maximisation (Lange et al. 1989)
        scale = ((n + 1) / (n + (r / scale).square()) * r.square()).mean().sqrt().clamp(min=least)
    return law(torch.zeros_like(spread), scale * spread)
