"""scikit-learn's diabetes study as sentences: 442 patients, ten measurements, the progression a year later.

Source: Efron, Hastie, Johnstone and Tibshirani, "Least Angle Regression" (2004), in the recorded units. The study does
not say which sexes the codes 1 and 2 mean. The weight class in words is derived from the body mass index, which comes
last: words that differ between patients would give the numbers behind them different names (`NamedNumbers`). Each text
ends with the progression score. A fixed permutation splits the patients into 342 for training and 100 held out.
"""

from functools import cache

import numpy as np

from cqwen_dist.data.cells import as_text

_TRAIN = 342
# World Health Organization classes: (upper limit of the body mass index, name)
_WEIGHT_CLASSES = ((18.5, "underweight"), (25.0, "normal"), (30.0, "overweight"), (float("inf"), "obese"))
_SENTENCE = (
    "Serum: total cholesterol {}, low-density lipoproteins {}, high-density lipoproteins {}, "
    "cholesterol ratio {}, log triglycerides {}, glucose {}. "
    "A patient of sex {}, age {}, mean blood pressure {}, body mass index {} {}. "
    "The disease progression after one year was {}."
)


@cache
def diabetes_table() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The parts train (342 patients) and test (100) as numbers: unscaled measurements [n,10] in the order of the study,
    and the progression [n], float64."""
    from sklearn.datasets import load_diabetes

    study = load_diabetes(scaled=False)
    train, test = np.split(np.random.RandomState(0).permutation(len(study.target)), [_TRAIN])
    return {name: (study.data[rows], study.target[rows]) for name, rows in (("train", train), ("test", test))}


def diabetes_texts(part: str) -> list[str]:
    """One text per patient in a part (train or test), in the order of `diabetes_table`."""
    texts = []
    for row, progression in zip(*diabetes_table()[part], strict=True):
        age, sex, index, pressure, *rest = row
        numbers = [as_text(float(value)) for value in (*rest, sex, age, pressure, index, progression)]
        weight = next(name for limit, name in _WEIGHT_CLASSES if index < limit)
        texts.append(_SENTENCE.format(*numbers[:-1], weight, numbers[-1]))
    return texts


@cache
def ridge_error() -> float:
    """Held-out median absolute error of a cross-validated ridge regression on the ten measurements."""
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = diabetes_table()["test"]
    ridge = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 25))).fit(*diabetes_table()["train"])
    return float(np.median(np.abs(y - ridge.predict(x))))
