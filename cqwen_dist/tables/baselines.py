"""Standard models without a language model, on the same rows.

Every one is fitted in the unit that CausalQwen's target has, to the squared and to the absolute error. Folds of the
training rows choose between the two. Predictions are held in the same range as CausalQwen's. The models are
scikit-learn's, and LightGBM and CatBoost if installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from cqwen_dist.data.statistics import signed_log
from cqwen_dist.prediction.learnt_range import MARGIN
from cqwen_dist.tables.encoding import EncodedRows
from cqwen_dist.tables.rows import Table

ALPHAS = np.logspace(-3, 4, 15)
MANY = 4096  # rows
FEW = 1000  # rows: all folds choose, not only the first
FOLDS = 3
SQUARED, ABSOLUTE = "squared error", "absolute error"
Ways = dict[str, Callable[[np.ndarray], np.ndarray]]  # the loss: rows -> predictions; fits when called


class Rival(NamedTuple):
    """A model's name, its predictions [m] for the test rows, its loss; 90 % intervals [m,2], if any."""

    name: str
    predicted: np.ndarray
    fitted_to: str
    ends: np.ndarray | None = None


class TargetUnit(NamedTuple):
    """The unit that all models are fitted in, and the range of the targets learnt from, in it."""

    by_log: bool
    low: float
    high: float

    @classmethod
    def of(cls, learnt: np.ndarray, by_log: bool) -> TargetUnit:
        y = signed_log(learnt) if by_log else learnt
        return cls(by_log, float(y.min()), float(y.max()))

    def forward(self, values: np.ndarray) -> np.ndarray:
        return signed_log(values) if self.by_log else values

    def back(self, found: np.ndarray, reach: float = MARGIN) -> np.ndarray:
        """In the raw unit, held in the range and `reach` of its width beyond either end."""
        further = reach * (self.high - self.low)
        found = np.clip(found, self.low - further, self.high + further)
        return np.sign(found) * np.expm1(np.abs(found)) if self.by_log else found


def baselines(
    table: Table, train: np.ndarray, test: np.ndarray, texts: Sequence[str], by_log: bool = False
) -> Iterator[Rival]:
    """Fits the models one by one. texts: every row as one text, without the target. by_log: fits logarithms."""
    values = table.values()
    yield Rival("always the median", np.full(len(test), np.median(values[train])), ABSOLUTE)
    unit = TargetUnit.of(values[train], by_log)
    y = unit.forward(values)
    order = np.random.default_rng(0).permutation(train)
    held_out = np.array_split(order, FOLDS)[: FOLDS if len(train) <= FEW else 1]
    folds = [(EncodedRows(table, texts, y, np.setdiff1d(train, held)), held) for held in held_out]
    whole = EncodedRows(table, texts, y, train)
    for name, model in _models(whole).items():
        ways = model(whole)
        lost = dict.fromkeys(ways, 0.0)
        for part, held in folds if len(ways) > 1 else ():
            fits = model(part)
            for way in ways:
                lost[way] += float(np.abs(unit.back(fits[way](held)) - values[held]).sum())
        chosen = min(lost, key=lambda way: lost[way])
        yield Rival(name, unit.back(ways[chosen](test)), chosen)


def _models(rows: EncodedRows) -> dict[str, Callable[[EncodedRows], Ways]]:
    """The models that can read these rows and are installed."""
    found: dict[str, Callable[[EncodedRows], Ways]] = {}
    if rows.numbers.shape[1]:
        found["ridge, numeric columns"] = lambda of: _ridge(of, of.filled)
    if rows.has_words:
        found["ridge, TF-IDF and one-hot"] = lambda of: _ridge(of, of.linear)
        found["ridge, TF-IDF of words and pairs"] = _words
    found["gradient boosting"] = lambda of: _trees(of, _histograms)
    if find_spec("lightgbm"):
        found["LightGBM"] = lambda of: _trees(of, _lightgbm)
    if find_spec("catboost"):
        found["CatBoost"] = _catboost
    return found


def _ridge(of: EncodedRows, x: Any) -> Ways:
    """Ridge regression with the strength from leave-one-out, or from a quarter of many rows.

    Leave-one-out needs an array [rows, rows]. The absolute error is that of squares with weights 1 / residual.
    """
    from sklearn.linear_model import Ridge, RidgeCV
    from sklearn.model_selection import ShuffleSplit

    own, y = x[of.learnt], of.y[of.learnt]
    quarter = ShuffleSplit(1, test_size=0.25, random_state=0) if len(y) > MANY else None
    model = RidgeCV(ALPHAS, cv=quarter).fit(own, y)

    def absolute(rows: np.ndarray) -> np.ndarray:
        weighted = model
        for _ in range(5):
            residual = np.abs(y - weighted.predict(own))
            weight = 1 / np.maximum(residual, 0.1 * residual.mean() + 1e-12)
            weighted = Ridge(model.alpha_).fit(own, y, sample_weight=weight / weight.mean())
        return np.asarray(weighted.predict(x[rows]))

    return {SQUARED: lambda rows: np.asarray(model.predict(x[rows])), ABSOLUTE: absolute}


def _words(of: EncodedRows) -> Ways:
    """Ridge regression on words and pairs, and if there is time on parts of words too."""
    kinds = {"": of.pairs}
    if len(of.learnt) <= MANY:
        kinds[", with parts of words"] = of.characters
    return {f"{way}{kind}": fit for kind, x in kinds.items() for way, fit in _ridge(of, x).items()}


def _trees(of: EncodedRows, make: Callable[[bool, int], Any]) -> Ways:
    """Boosted trees. make: (whether to the absolute error, the least rows in a leaf) -> the model."""

    def fitted(absolute: bool, rows: np.ndarray) -> np.ndarray:
        least = min(20, max(2, len(of.learnt) // 20))  # 20, the usual one, leaves small tables without a split
        model = make(absolute, least).fit(of.dense[of.learnt], of.y[of.learnt])
        return np.asarray(model.predict(of.dense[rows]))

    return {SQUARED: partial(fitted, False), ABSOLUTE: partial(fitted, True)}


def _histograms(absolute: bool, least: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    loss = "absolute_error" if absolute else "squared_error"
    return HistGradientBoostingRegressor(loss=loss, min_samples_leaf=least, random_state=0)


def _lightgbm(absolute: bool, least: int) -> Any:
    from lightgbm import LGBMRegressor

    options = {"n_jobs": 1, "verbose": -1}  # its threads wait for each other by spinning: ruinous next to other work
    loss = "l1" if absolute else "l2"
    return LGBMRegressor(objective=loss, n_estimators=300, learning_rate=0.05, min_child_samples=least, **options)


def _catboost(of: EncodedRows) -> Ways:
    """CatBoost, which encodes categories itself."""
    from catboost import CatBoostRegressor

    x = np.hstack([of.categories, of.numbers.astype(object), of.components.astype(object)])
    categories = list(range(of.categories.shape[1]))

    def fitted(loss: str, rows: np.ndarray) -> np.ndarray:
        quiet = {"verbose": False, "allow_writing_files": False}
        model = CatBoostRegressor(500, loss_function=loss, cat_features=categories, random_seed=0, **quiet)
        return np.asarray(model.fit(x[of.learnt], of.y[of.learnt]).predict(x[rows]))

    return {SQUARED: partial(fitted, "RMSE"), ABSOLUTE: partial(fitted, "MAE")}
