"""Which law the errors of the closed form have: the one of least CRPS on folds left out."""

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.number_laws import LAWS, Laplace

LEAST = 40  # errors: fewer tell no laws apart
TURNS = 60  # of a scale's fixed point: then it moves by less than 1e-6


class FittedLaw(NamedTuple):
    """A law, and its scale in the errors' unit."""

    name: str
    scale: float
    crps: dict[str, float]  # of the laws tried (the best t of all), held out; without a choice none


def fit_law(asked: str, error: Tensor, h: Tensor, folds: Tensor) -> FittedLaw:
    """The law of least CRPS among those asked for: a name in `LAWS`, "student" (any freedom) or "auto" (any law).

    error, h [n] float64: e_i has the law with scale exp(h_i) times one constant. For the figures it is the
    likeliest for the other folds [n], for the result for all. With fewer than `LEAST` errors auto is the Cauchy, and
    student a t with 4.
    """
    names = [name for name in LAWS if asked in ("auto", name, name.partition("-")[0])]
    spread, r = h.exp(), error / h.exp()
    if len(names) > 1 and (len(r) < LEAST or bool((folds == folds[0]).all())):
        names = ["cauchy" if asked == "auto" else "student-4"]
    choice = names if len(names) > 1 else []
    crps = dict.fromkeys(choice, 0.0)
    for fold, name in product(folds.unique(), choice):
        own = folds == fold
        law = _fitted(LAWS[name], r[~own], spread[own])
        crps[name] += float(law.crps(error[own]).sum()) / len(r)
    ranked = sorted(names, key=lambda name: crps.get(name, 0.0))
    students, best = [name for name in ranked if name.startswith("student")], ranked[0]
    crps = {name: found for name, found in crps.items() if name not in students[1:]}
    return FittedLaw(best, float(_fitted(LAWS[best], r, torch.ones(1, dtype=r.dtype)).scale), crps)


def law_said(law: str, crps: Mapping[str, float]) -> str:
    """The law and why, from `FittedLaw`: "laplace, with the least CRPS on rows left out (student-4 +0.3%)"."""
    others = sorted((of, name) for name, of in crps.items() if name != law)
    more = ", ".join(f"{name} {of / crps[law] - 1:+.1%}" for of, name in others)
    return f"{law}, with the least CRPS on rows left out ({more})" if more else law


def _fitted(law: type[Cauchy], r: Tensor, spread: Tensor) -> Cauchy:
    """The law about 0 with the scale that is likeliest for errors r [n], times spread [m]."""
    least = 1e-9 * float(r.abs().max()) + 1e-30
    if law is Laplace:
        scale = r.abs().mean().clamp(min=least)
    else:  # a t's weights, by expectation and maximisation (Lange, Little and Taylor 1989)
        n, scale = getattr(law, "freedom", 1), r.abs().median().clamp(min=least)
        for _ in range(TURNS):
            scale = ((n + 1) / (n + (r / scale).square()) * r.square()).mean().sqrt().clamp(min=least)
    return law(torch.zeros_like(spread), scale * spread)
