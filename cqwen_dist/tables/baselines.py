"""What a person would use without a language model, on the same rows, each with its own defaults.

They are scikit-learn's; CatBoost and NGBoost come along where they are installed.
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
CATEGORIES = 255  # of a column, at most, as HistGradientBoosting allows


def baselines(
    table: Table, train: np.ndarray, test: np.ndarray, texts: Sequence[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, predictions [m] of the test rows). texts: every row as one text, the target not in it."""
    y = table.values()[train]
    yield "always the median", np.full(len(test), np.median(y))
    numbers = _numbers(table)
    prepared = _prepared(numbers, train)
    if table.numeric:
        yield "ridge, numeric columns", _ridge(prepared[train], y, prepared[test])
    if any(re.search(r"\w\w", texts[row]) for row in train):  # scikit-learn's words are of two letters or more
        words = _words(table, prepared, train, texts)
        yield "ridge, TF-IDF and one-hot", _ridge(words[train], y, words[test])
        pairs = _tf_idf(train, texts, longest=2)
        yield "ridge, TF-IDF of words and pairs", _ridge(pairs[train], y, pairs[test])
    yield "gradient boosting", _boosted(table, numbers, train, test)
    if find_spec("catboost"):
        yield "CatBoost", _catboost(table, numbers, train, test)


def natural_boosting(table: Table, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Means and standard deviations [m] of the test rows by NGBoost's normal law; None where it is not installed."""
    if not find_spec("ngboost"):
        return None
    from ngboost import NGBRegressor

    x, _ = _columns(table, _prepared(_numbers(table), train), train)
    x = np.nan_to_num(x, nan=-1.0)  # a text that training never had
    law = NGBRegressor(verbose=False, random_state=0).fit(x[train], table.values()[train]).pred_dist(x[test])
    return law.params["loc"], law.params["scale"]


def _numbers(table: Table) -> np.ndarray:
    """The numeric columns [n, columns], NaN where a cell is empty."""
    rows = [[float(row[name] or "nan") for name in table.numeric] for row in table.rows]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(table.numeric))


def _prepared(numbers: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Standardised, an empty cell the median, with a column that says so; all by the training rows."""
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if not numbers.shape[1]:
        return numbers
    steps = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True), StandardScaler()
    return np.asarray(make_pipeline(*steps).fit(numbers[train]).transform(numbers))


def _ridge(x: np.ndarray | csr_matrix, y: np.ndarray, x_test: np.ndarray | csr_matrix) -> np.ndarray:
    """Its strength by leaving out each row; of many rows a third, as the former needs an array [rows, rows]."""
    from sklearn.linear_model import RidgeCV
    from sklearn.model_selection import KFold

    folds = KFold(3, shuffle=True, random_state=0) if len(y) > MANY else None
    return np.asarray(RidgeCV(ALPHAS, cv=folds).fit(x, y).predict(x_test))


def _tf_idf(train: np.ndarray, texts: Sequence[str], longest: int = 1) -> csr_matrix:
    """Sparse [n, words]: each row's words, and sequences of up to `longest` words, by TF-IDF."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    return TfidfVectorizer(ngram_range=(1, longest)).fit([texts[i] for i in train]).transform(texts)


def _words(table: Table, numbers: np.ndarray, train: np.ndarray, texts: Sequence[str]) -> csr_matrix:
    """Sparse [n, words + cells + numbers]: the text's words by TF-IDF, each cell of a text column one-hot."""
    from scipy.sparse import csr_matrix, hstack
    from sklearn.feature_extraction import DictVectorizer

    named = [{name: row[name] for name in table.columns if name not in table.numeric} for row in table.rows]
    cells = DictVectorizer().fit([named[i] for i in train]).transform(named)
    return csr_matrix(hstack([_tf_idf(train, texts), cells, csr_matrix(numbers)]))


def _boosted(table: Table, numbers: np.ndarray, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """HistGradientBoosting on numbers and categories; of a column of more than 255 texts each is a number."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    x, texts = _columns(table, numbers, train)
    categorical = [0 < found <= CATEGORIES for found in texts]
    model = HistGradientBoostingRegressor(categorical_features=categorical, random_state=0)
    return np.asarray(model.fit(x[train], table.values()[train]).predict(x[test]))


def _columns(table: Table, numbers: np.ndarray, train: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """x [n, columns], each text of training a number, other texts NaN, then the numbers; how many texts a column has,
    0 of numbers."""
    from sklearn.preprocessing import OrdinalEncoder

    texts = [0] * numbers.shape[1]
    cells = _cells(table)
    if not cells.shape[1]:
        return numbers, texts
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan).fit(cells[train])
    return np.hstack([encoder.transform(cells), numbers]), [len(found) for found in encoder.categories_] + texts


def _cells(table: Table) -> np.ndarray:
    """The columns of text [n, columns], of objects."""
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
