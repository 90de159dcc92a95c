"""People whose response to every dose is known: the structural model that `treatments` is tried on.

y(dose) = 30 + 0.2 age - 1.5 severity + gain(dose) h(symptom) + u spread(dose)

u ~ Normal(0, 2) is the individual, unseen and independent of the rest. The normal is the law that suits least squares
best; it is not the Cauchy of the design. The dose is larger for those who are worse (confounding by what is
seen). y rises with u at every dose, so that a person's quantile is the same at every dose, and y at one dose gives y at
all others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import norm

HELP = {"cough": 1.0, "fever": 1.6, "fatigue": 0.4, "headache": 0.8}  # h: how much the dose helps
COLUMNS = ("age", "severity", "symptom", "dose")
TARGET = "outcome"
DOSES = (0.0, 1.0, 2.0, 3.0, 4.0)
SPREAD_U, WIDENING = 2.0, 0.5


class People(NamedTuple):
    """n people: what is seen of them, and u."""

    age: np.ndarray  # [n] years
    severity: np.ndarray  # [n] 0 to 10
    symptom: np.ndarray  # [n] str, of `HELP`
    dose: np.ndarray  # [n] 0 to 4, the one that each was given
    u: np.ndarray  # [n]

    @classmethod
    def drawn(cls, count: int, seed: int) -> People:
        """So many people, by seed. What is written in a table is rounded as it is written."""
        draw = np.random.default_rng(seed)
        age = draw.integers(20, 91, count).astype(float)
        severity = draw.uniform(0, 10, count).round(1)
        symptom = draw.choice(list(HELP), count)
        dose = 0.5 + 0.25 * severity + 0.01 * (age - 55) + draw.normal(0, 1, count)
        return cls(age, severity, symptom, dose.clip(0, 4).round(1), draw.normal(0, SPREAD_U, count))

    def outcome(self, dose: np.ndarray, u: np.ndarray | None = None) -> np.ndarray:
        """y [n,k] at doses [n,k] (or what fits them), of these people or with other u [n]."""
        u = self.u if u is None else u
        seen = 30 + 0.2 * self.age - 1.5 * self.severity
        help_of = np.array([HELP[name] for name in self.symptom])
        return seen[:, None] + gain(dose) * help_of[:, None] + u[:, None] * spread(dose)

    def quantile(self, dose: np.ndarray, level: float) -> np.ndarray:
        """The quantile [n,k] of y over all u, for people like these at doses [n,k]."""
        return self.outcome(dose, np.full(len(self.age), SPREAD_U * norm.ppf(level)))

    def rows(self, dose: np.ndarray | None = None) -> list[dict[str, str]]:
        """A table's rows, of `COLUMNS`, as text; dose [n]: another than the one that was given."""
        given = self.dose if dose is None else dose
        cells = zip(self.age, self.severity, self.symptom, given, strict=True)
        return [{"age": f"{a:g}", "severity": f"{s:g}", "symptom": str(w), "dose": f"{d:g}"} for a, s, w, d in cells]


def gain(dose: np.ndarray) -> np.ndarray:
    """What a dose adds to y for h = 1: it levels off."""
    return 8 * (1 - np.exp(-dose / 1.5))


def spread(dose: np.ndarray) -> np.ndarray:
    """What a dose multiplies u by: people differ more, the more they take."""
    return 1 + WIDENING * dose


def average_effect(dose: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The mean over all people of y(other) - y(dose); u has mean 0."""
    return (gain(other) - gain(dose)) * float(np.mean(list(HELP.values())))
