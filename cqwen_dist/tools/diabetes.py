"""scikit-learn's diabetes study as sentences: 442 patients, ten measurements, the progression a year later.

Source: Efron, Hastie, Johnstone and Tibshirani, "Least Angle Regression" (2004), in the recorded units. The study does
not say which sexes the codes 1 and 2 mean. The weight class in words is derived from the body mass index. Each text
ends with the progression score. A fixed permutation splits the patients into 342 for training and 100 held out.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cqwen_dist.data.cells import as_text

_TRAIN = 342
# World Health Organization classes: (upper limit of the body mass index, name)
_WEIGHT_CLASSES = ((18.5, "underweight"), (25.0, "normal"), (30.0, "overweight"), (float("inf"), "obese"))
_SENTENCE = (
    "A patient of sex {}, age {}, body mass index {} {}, mean blood pressure {}. "
    "Serum: total cholesterol {}, low-density lipoproteins {}, high-density lipoproteins {}, "
    "cholesterol ratio {}, log triglycerides {}, glucose {}. "
    "The disease progression after one year was {}."
)


class DiabetesTable(NamedTuple):
    """The same split as numbers: x [n,10] float64 in the order of the study, y [n] float64."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


@lru_cache(maxsize=1)
def diabetes_table() -> DiabetesTable:
    """Unscaled measurements and progression for the 342 training and 100 held-out patients."""
    from sklearn.datasets import load_diabetes

    study = load_diabetes(scaled=False)
    order = np.random.RandomState(0).permutation(len(study.target))
    train, test = order[:_TRAIN], order[_TRAIN:]
    return DiabetesTable(study.data[train], study.target[train], study.data[test], study.target[test])


def diabetes_texts(part: str) -> list[str]:
    """One text per patient in a part (train or test), in the order of `diabetes_table`."""
    table = diabetes_table()
    x, y = (table.x_train, table.y_train) if part == "train" else (table.x_test, table.y_test)
    texts = []
    for row, progression in zip(x, y, strict=True):
        age, sex, index, *rest = row
        numbers = [as_text(float(value)) for value in (sex, age, index, *rest, progression)]
        weight = next(name for limit, name in _WEIGHT_CLASSES if index < limit)
        texts.append(_SENTENCE.format(*numbers[:3], weight, *numbers[3:]))
    return texts


class Baselines(NamedTuple):
    """Held-out median absolute errors of simple baselines, in units of the progression score."""

    median: float
    ridge: float


@lru_cache(maxsize=1)
def baselines() -> Baselines:
    """Baselines: the training median, and a cross-validated ridge regression on the ten measurements."""
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    table = diabetes_table()
    ridge = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 25))).fit(table.x_train, table.y_train)
    return Baselines(
        median=float(np.median(np.abs(table.y_test - np.median(table.y_train)))),
        ridge=float(np.median(np.abs(table.y_test - ridge.predict(table.x_test)))),
    )
