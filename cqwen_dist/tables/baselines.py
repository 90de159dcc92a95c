"""Standard models without a language model, on the same rows as numbers (`EncodedRows`).

Every one is fitted in the unit that CausalQwen's target has, to the squared and to the absolute error. Folds of the
training rows choose between the two. Predictions are held in the same range as CausalQwen's. The models are
scikit-learn's, and LightGBM and CatBoost if installed.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_matrix, hstack
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Ridge, RidgeCV
from sklearn.model_selection import ShuffleSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler, TargetEncoder

from cqwen_dist.data.recipes import LARGEST
from cqwen_dist.heads.targets import signed_log
from cqwen_dist.prediction.learnt_table import MARGIN
from cqwen_dist.tables.rows import Table

MOST_DIFFERENT = 0.5  # distinct cells per filled cell in a column of categories; above it the column is free text
COMPONENTS = 64  # of the words, for trees
RARE = 3  # rows; rarer categories share a column
ENCODED_FOLDS = 5
SMOOTHED = 5  # rows
MOST_CHARACTERS = 50_000  # different character n-grams
_DAYS = ["%Y/%m/%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%b %d %Y", "%b %d, %Y", "%B %d, %Y", "%d %b %Y"]
_DATES = [*_DAYS, "%d %B %Y", "%b %Y", "%B %Y", "%Y-%m"]  # and ISO 8601


class EncodedRows:
    """All rows of a table; everything that is learnt (means, words, categories) is learnt from some rows only."""

    def __init__(self, table: Table, texts: Sequence[str], y: np.ndarray, learnt: np.ndarray) -> None:
        """texts: every row as one text, without the target. y [n]: the targets. learnt [m]: rows to learn from."""
        self.texts, self.y, self.learnt = texts, y, learnt
        self.has_words = any(re.search(r"\w\w", texts[row]) for row in learnt)  # words have at least two letters
        columns = [np.array([[float(row[name] or "nan")] for row in table.rows]) for name in table.numeric]
        columns = [column.clip(-LARGEST, LARGEST) for column in columns]
        categories = []
        for name in (name for name in table.columns if name not in table.numeric):
            cells = [row[name] for row in table.rows]
            if (parts := date_parts(cells, learnt)) is not None:
                columns.append(parts)
                continue
            filled = [cells[row] for row in learnt if cells[row]]
            if filled and len(set(filled)) <= max(MOST_DIFFERENT * len(filled), 2):
                categories.append(cells)
        self.numbers = np.hstack([np.empty((len(y), 0)), *columns])  # [n, numbers and parts of dates], NaN if empty
        self.categories = np.array(categories, dtype=object).reshape(-1, len(y)).T  # [n, columns] of texts

    @cached_property
    def filled(self) -> np.ndarray:
        """`numbers`, standardised, with the median and an indicator column for empty cells."""
        if not self.numbers.shape[1]:
            return self.numbers
        steps = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True), StandardScaler()
        return np.asarray(make_pipeline(*steps).fit(self.numbers[self.learnt]).transform(self.numbers))

    def tf_idf(self, **options: Any) -> csr_matrix:
        """Sparse [n, words]: TF-IDF. options: of scikit-learn's vectorizer."""
        return TfidfVectorizer(**options).fit([self.texts[row] for row in self.learnt]).transform(self.texts)

    @cached_property
    def pairs(self) -> csr_matrix:
        """TF-IDF of words and pairs of words."""
        return self.tf_idf(ngram_range=(1, 2))

    @cached_property
    def characters(self) -> csr_matrix:
        """`pairs`, and TF-IDF of two to five characters within words: parts and other spellings of words."""
        of_characters = {"analyzer": "char_wb", "ngram_range": (2, 5), "max_features": MOST_CHARACTERS}
        return csr_matrix(hstack([self.pairs, self.tf_idf(sublinear_tf=True, **of_characters)]))

    @cached_property
    def linear(self) -> csr_matrix:
        """For linear models: words, a column per category (rare ones share one), and `filled`."""
        parts = [self.tf_idf(), csr_matrix(self.filled)] if self.has_words else [csr_matrix(self.filled)]
        if self.categories.shape[1]:
            encoder = OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=RARE)
            parts.append(encoder.fit(self.categories[self.learnt]).transform(self.categories))
        return csr_matrix(hstack(parts))

    @cached_property
    def components(self) -> np.ndarray:
        """[n, components] of `pairs`; without columns if there are no words."""
        count = min(COMPONENTS, len(self.learnt) // 10) if self.has_words else 0
        count = min(count, self.pairs.shape[1] - 1) if count else 0
        if count < 1:
            return np.empty((len(self.y), 0))
        svd = TruncatedSVD(count, random_state=0).fit(self.pairs[self.learnt])
        return np.asarray(svd.transform(self.pairs))

    @cached_property
    def dense(self) -> np.ndarray:
        """For trees: `numbers`, each category as the mean target of its rows, and `components`; at least one column."""
        means = np.empty((len(self.y), 0))
        if self.categories.shape[1]:
            # A training row's own fold is left out, or the mean of a rare category would tell its target
            encoder = TargetEncoder(target_type="continuous", smooth=SMOOTHED, cv=ENCODED_FOLDS, random_state=0)
            own = encoder.fit_transform(self.categories[self.learnt], self.y[self.learnt])
            means = encoder.transform(self.categories)
            means[self.learnt] = own
        numbers = np.where(np.isnan(self.numbers[self.learnt]).all(0), 0.0, self.numbers)  # histograms need numbers
        return np.column_stack([numbers, self.components, means, np.zeros(len(self.y))])


def date_parts(cells: Sequence[str], learnt: np.ndarray) -> np.ndarray | None:
    """[n, 5 or 6] year, month, day, weekday, days since year 1, and the hour if any differs; NaN for other texts.

    None if a filled cell of the training rows is no date, or has a different form.
    """
    filled = [cells[row] for row in learnt if cells[row]]
    form = next((form for form in ("", *_DATES) if filled and all(_date(cell, form) for cell in filled)), None)
    if form is None:
        return None
    none = [np.nan] * 6
    parts = np.array([_date(cell, form) or none for cell in cells])
    return parts if len(np.unique(parts[learnt, 5])) > 1 else parts[:, :5]


def _date(cell: str, form: str) -> list[float] | None:
    try:
        at = datetime.strptime(cell, form) if form else datetime.fromisoformat(cell) if "-" in cell else None
    except ValueError:
        return None
    return None if at is None else [at.year, at.month, at.day, at.weekday(), at.toordinal(), at.hour + at.minute / 60]


ALPHAS = np.logspace(-3, 4, 15)
MANY = 4096  # rows
FEW = 1000  # rows: all folds choose, not only the first
FOLDS = 3
SQUARED, ABSOLUTE = "squared error", "absolute error"
Ways = dict[str, Callable[[np.ndarray], np.ndarray]]  # the loss: rows -> predictions; fits when called


class Rival(NamedTuple):
    """A model's name, its predictions [m] for the test rows, its loss."""

    name: str
    predicted: np.ndarray
    fitted_to: str


def over_folds(found: Sequence[Sequence[Rival]]) -> Iterator[Rival]:
    """The models that each fold has, with the predictions of all folds' test rows one after the other."""
    for name in [rival.name for rival in found[0]]:
        same = [rival for rivals in found for rival in rivals if rival.name == name]
        if len(same) == len(found):
            fitted_to = " or ".join(sorted({rival.fitted_to for rival in same}))
            yield Rival(name, np.concatenate([rival.predicted for rival in same]), fitted_to)


class TargetUnit(NamedTuple):
    """The unit that all models are fitted in, and the range of the targets learnt from, in it."""

    by_log: bool
    low: float
    high: float

    def back(self, found: np.ndarray) -> np.ndarray:
        """In the raw unit, held in the range and `MARGIN` of its width beyond either end."""
        further = MARGIN * (self.high - self.low)
        found = np.clip(found, self.low - further, self.high + further)
        return np.sign(found) * np.expm1(np.abs(found)) if self.by_log else found


def baselines(
    table: Table, train: np.ndarray, test: np.ndarray, texts: Sequence[str], by_log: bool = False
) -> Iterator[Rival]:
    """Fits the models one by one. texts: every row as one text, without the target. by_log: fits logarithms."""
    values = table.values()
    yield Rival("always the median", np.full(len(test), np.median(values[train])), ABSOLUTE)
    y = signed_log(values) if by_log else values
    unit = TargetUnit(by_log, float(y[train].min()), float(y[train].max()))
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
    found["gradient boosting"] = lambda of: _trees(of, _histograms, "squared_error", "absolute_error")
    if find_spec("lightgbm"):
        found["LightGBM"] = lambda of: _trees(of, _lightgbm, "l2", "l1")
    if find_spec("catboost"):
        found["CatBoost"] = _catboost
    return found


def _ridge(of: EncodedRows, x: Any) -> Ways:
    """Ridge regression with the strength from leave-one-out, or from a quarter of many rows.

    Leave-one-out needs an array [rows, rows]. The absolute error is that of squares with weights 1 / residual.
    """
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


def _trees(of: EncodedRows, make: Callable[[str, int], Any], squared: str, absolute: str) -> Ways:
    """Boosted trees. make: (loss, least rows in a leaf) -> the model. squared, absolute: the losses' names."""

    def fitted(loss: str, rows: np.ndarray) -> np.ndarray:
        least = min(20, max(2, len(of.learnt) // 20))  # 20, the usual one, leaves small tables without a split
        model = make(loss, least).fit(of.dense[of.learnt], of.y[of.learnt])
        return np.asarray(model.predict(of.dense[rows]))

    return {SQUARED: partial(fitted, squared), ABSOLUTE: partial(fitted, absolute)}


def _histograms(loss: str, least: int) -> Any:
    return HistGradientBoostingRegressor(loss=loss, min_samples_leaf=least, random_state=0)


def _lightgbm(loss: str, least: int) -> Any:
    from lightgbm import LGBMRegressor

    options = {"n_jobs": 1, "verbose": -1}  # its threads wait for each other by spinning: ruinous next to other work
    return LGBMRegressor(objective=loss, n_estimators=300, learning_rate=0.05, min_child_samples=least, **options)


def _catboost(of: EncodedRows) -> Ways:
    from catboost import CatBoostRegressor

    x = np.hstack([of.categories, of.numbers.astype(object), of.components.astype(object)])
    categories = list(range(of.categories.shape[1]))

    def fitted(loss: str, rows: np.ndarray) -> np.ndarray:
        quiet = {"verbose": False, "allow_writing_files": False}
        model = CatBoostRegressor(500, loss_function=loss, cat_features=categories, random_seed=0, **quiet)
        return np.asarray(model.fit(x[of.learnt], of.y[of.learnt]).predict(x[rows]))

    return {SQUARED: partial(fitted, "RMSE"), ABSOLUTE: partial(fitted, "MAE")}
