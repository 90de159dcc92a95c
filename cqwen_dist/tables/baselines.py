"""Standard baselines without a language model on the same rows, with their default settings.

They are from scikit-learn. CatBoost and NGBoost are added if installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from cqwen_dist.tables.rows import Table

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

ALPHAS = np.logspace(-3, 4, 15)
MANY = 4096  # rows
CATEGORIES = 255  # the maximum per column in HistGradientBoosting


def baselines(
    table: Table, train: np.ndarray, test: np.ndarray, texts: Sequence[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, predictions [m] for the test rows). texts: every row as one text, without the target."""
    y = table.values()[train]
    yield "always the median", np.full(len(test), np.median(y))
    numbers = _numbers(table)
    prepared = _prepared(numbers, train)
    if table.numeric:
        yield "ridge, numeric columns", _ridge(prepared[train], y, prepared[test])
    if any(re.search(r"\w\w", texts[row]) for row in train):  # scikit-learn's words have at least two letters
        words = _words(table, prepared, train, texts)
        yield "ridge, TF-IDF and one-hot", _ridge(words[train], y, words[test])
        pairs = _tf_idf(train, texts, longest=2)
        yield "ridge, TF-IDF of words and pairs", _ridge(pairs[train], y, pairs[test])
    yield "gradient boosting", _boosted(table, numbers, train, test)
    if find_spec("catboost"):
        yield "CatBoost", _catboost(table, numbers, train, test)


def natural_boosting(table: Table, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Means and standard deviations [m] for the test rows from NGBoost's normal law; None if not installed."""
    if not find_spec("ngboost"):
        return None
    from ngboost import NGBRegressor

    x, _ = _columns(table, _prepared(_numbers(table), train), train)
    x = np.nan_to_num(x, nan=-1.0)  # a text that is not in the training rows
    law = NGBRegressor(verbose=False, random_state=0).fit(x[train], table.values()[train]).pred_dist(x[test])
    return law.params["loc"], law.params["scale"]


def _numbers(table: Table) -> np.ndarray:
    """The numeric columns [n, columns], with NaN for empty cells."""
    rows = [[float(row[name] or "nan") for name in table.numeric] for row in table.rows]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(table.numeric))


def _prepared(numbers: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Standardises, and fills empty cells with the median plus an indicator column, all from the training rows."""
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if not numbers.shape[1]:
        return numbers
    steps = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True), StandardScaler()
    return np.asarray(make_pipeline(*steps).fit(numbers[train]).transform(numbers))


def _ridge(x: np.ndarray | csr_matrix, y: np.ndarray, x_test: np.ndarray | csr_matrix) -> np.ndarray:
    """Ridge regression with the strength from leave-one-out, or 3 folds for many rows.

    Leave-one-out needs an array [rows, rows].
    """
    from sklearn.linear_model import RidgeCV
    from sklearn.model_selection import KFold

    folds = KFold(3, shuffle=True, random_state=0) if len(y) > MANY else None
    return np.asarray(RidgeCV(ALPHAS, cv=folds).fit(x, y).predict(x_test))


def _tf_idf(train: np.ndarray, texts: Sequence[str], longest: int = 1) -> csr_matrix:
    """Sparse [n, words]: TF-IDF for words and sequences of up to `longest` words."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    return TfidfVectorizer(ngram_range=(1, longest)).fit([texts[i] for i in train]).transform(texts)


def _words(table: Table, numbers: np.ndarray, train: np.ndarray, texts: Sequence[str]) -> csr_matrix:
    """Sparse [n, words + cells + numbers]: TF-IDF for words, one-hot cells for text columns, and the numbers."""
    from scipy.sparse import csr_matrix, hstack
    from sklearn.feature_extraction import DictVectorizer

    named = [{name: row[name] for name in table.columns if name not in table.numeric} for row in table.rows]
    cells = DictVectorizer().fit([named[i] for i in train]).transform(named)
    return csr_matrix(hstack([_tf_idf(train, texts), cells, csr_matrix(numbers)]))


def _boosted(table: Table, numbers: np.ndarray, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """HistGradientBoosting on numbers and categories. A column with more than 255 texts is treated as numeric."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    x, texts = _columns(table, numbers, train)
    categorical = [0 < found <= CATEGORIES for found in texts]
    model = HistGradientBoostingRegressor(categorical_features=categorical, random_state=0)
    return np.asarray(model.fit(x[train], table.values()[train]).predict(x[test]))


def _columns(table: Table, numbers: np.ndarray, train: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """(x [n, columns], the number of texts per column, 0 for numeric ones).

    x has the text columns first, with an ordinal per training text and NaN for unknown texts.
    """
    from sklearn.preprocessing import OrdinalEncoder

    texts = [0] * numbers.shape[1]
    cells = _cells(table)
    if not cells.shape[1]:
        return numbers, texts
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan).fit(cells[train])
    return np.hstack([encoder.transform(cells), numbers]), [len(found) for found in encoder.categories_] + texts


def _cells(table: Table) -> np.ndarray:
    """The text columns [n, columns] as an object array."""
    named = [name for name in table.columns if name not in table.numeric]
    rows = [[row[name] for name in named] for row in table.rows]
    return np.array(rows, dtype=object).reshape(len(rows), len(named))


def _catboost(table: Table, numbers: np.ndarray, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """CatBoost on numbers and categories."""
    from catboost import CatBoostRegressor

    cells = _cells(table)
    x = np.hstack([cells, numbers.astype(object)])
    model = CatBoostRegressor(
        cat_features=list(range(cells.shape[1])), random_seed=0, verbose=False, allow_writing_files=False
    )
    return np.asarray(model.fit(x[train], table.values()[train]).predict(x[test]))
