"""The effect of another dose on a person: by laws of the outcome, with the person's quantile kept, and by regressions.

n people, k doses. Every law here has one shape, a location and a scale. So the same quantile (decision D50) is the same
distance from the location in scales: a factor that recalibrates the intervals of both laws cancels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import norm
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, PolynomialFeatures

from experiments.claims.people import HELP, People, gain, spread


class Law(NamedTuple):
    """The outcome's law: [n,k] each, raw unit. half: half of its 90 % interval, in scales; or one for all."""

    loc: np.ndarray
    scale: np.ndarray
    half: float | np.ndarray

    def at(self, columns: slice) -> Law:
        """The law at some of the doses."""
        half = np.broadcast_to(self.half, self.loc.shape)[:, columns]
        return Law(self.loc[:, columns], self.scale[:, columns], half)

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """The ends [n,k] of the central 90 % interval."""
        return self.loc - self.half * self.scale, self.loc + self.half * self.scale

    def rescaled(self, scale: np.ndarray, half: float) -> Law:
        """The same locations with other scales [n,k]."""
        return Law(self.loc, scale, half)


def same_quantile(own: Law, y: np.ndarray, other: Law) -> np.ndarray:
    """What would have been [n,k], of people whose outcome was y [n]. own: their law at the dose given, [n,1]. other: at
    other doses, [n,k]."""
    return other.loc + other.scale * (y[:, None] - own.loc) / own.scale


def least_squares(learnt: People, y: np.ndarray, asked: People, doses: np.ndarray) -> Law:
    """What one would fit without knowing the form: all columns, their squares and products, one normal error.

    y [n] of the people learnt from. doses [m,k], of the people asked for. Returns their law [m,k].
    """
    columns = make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore", sparse_output=False), [2]), remainder="passthrough"
    )
    model = make_pipeline(columns, PolynomialFeatures(2, include_bias=False), LinearRegression())
    own = _predicted(model.fit(_cells(learnt, learnt.dose), y), learnt, learnt.dose[:, None])[:, 0]
    loc = _predicted(model, asked, doses)
    return Law(loc, np.full(loc.shape, float(np.sqrt(np.square(y - own).mean()))), float(norm.ppf(0.95)))


def true_form(learnt: People, y: np.ndarray, asked: People, doses: np.ndarray) -> Law:
    """Least squares that knows how the outcome is made, but for the coefficients and the size of u: the best possible.

    As `least_squares`.
    """
    width = spread(learnt.dose)
    x = _form(learnt, learnt.dose) / width[:, None]
    found = np.linalg.lstsq(x, y / width, rcond=None)[0]
    size = float(np.sqrt(np.square(y / width - x @ found).mean()))
    loc = np.stack([_form(asked, column) @ found for column in doses.T], 1)
    return Law(loc, size * spread(doses), float(norm.ppf(0.95)))


def scale_of_errors(learnt: People, error: np.ndarray, asked: People, doses: np.ndarray) -> tuple[np.ndarray, float]:
    """Scales [m,k] from a regression of log |error| [n] on age, severity and dose; and the factor on them that nine of
    ten errors do not exceed."""
    size = np.log(np.abs(error).clip(1e-6))
    model = LinearRegression().fit(_numbers(learnt, learnt.dose), size)
    own = np.exp(model.predict(_numbers(learnt, learnt.dose)))
    scales = np.stack([np.exp(model.predict(_numbers(asked, column))) for column in doses.T], 1)
    return scales, float(np.quantile(np.abs(error) / own, 0.9))


def _numbers(people: People, dose: np.ndarray) -> np.ndarray:
    return np.stack([people.age, people.severity, dose], 1)


def _cells(people: People, dose: np.ndarray) -> np.ndarray:
    """Columns for scikit-learn: age, severity, symptom, dose."""
    return np.stack([people.age, people.severity, np.asarray(people.symptom, dtype=object), dose], 1)


def _predicted(model: Pipeline, people: People, doses: np.ndarray) -> np.ndarray:
    return np.stack([model.predict(_cells(people, column)) for column in doses.T], 1)


def _form(people: People, dose: np.ndarray) -> np.ndarray:
    """The columns of the true form: 1, age, severity, and the gain for each symptom."""
    symptoms = [gain(dose) * (people.symptom == name) for name in HELP]
    return np.stack([np.ones(len(dose)), people.age, people.severity, *symptoms], 1)
