"""What a person would use without a language model, on the same rows: scikit-learn's, each with its own defaults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cqwen_dist.tables.rows import Table

ALPHAS = np.logspace(-3, 4, 15)
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
    words = _words(table, prepared, train, texts)
    yield "ridge, TF-IDF and one-hot", _ridge(words[train], y, words[test])
    yield "gradient boosting", _boosted(table, numbers, train, test)


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


def _ridge(x: np.ndarray, y: np.ndarray, x_test: np.ndarray) -> np.ndarray:
    from sklearn.linear_model import RidgeCV

    return np.asarray(RidgeCV(ALPHAS).fit(x, y).predict(x_test))


def _words(table: Table, numbers: np.ndarray, train: np.ndarray, texts: Sequence[str]) -> np.ndarray:
    """Sparse [n, words + cells + numbers]: the text's words by TF-IDF, each cell of a text column one-hot."""
    from scipy.sparse import csr_matrix, hstack
    from sklearn.feature_extraction import DictVectorizer
    from sklearn.feature_extraction.text import TfidfVectorizer

    named = [{name: row[name] for name in table.columns if name not in table.numeric} for row in table.rows]
    words = TfidfVectorizer().fit([texts[i] for i in train]).transform(texts)
    cells = DictVectorizer().fit([named[i] for i in train]).transform(named)
    return csr_matrix(hstack([words, cells, csr_matrix(numbers)]))


def _boosted(table: Table, numbers: np.ndarray, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """HistGradientBoosting on numbers and categories; of a column of more than 255 texts each is a number."""
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.preprocessing import OrdinalEncoder

    named = [name for name in table.columns if name not in table.numeric]
    x, categorical = numbers, [False] * len(table.numeric)
    if named:
        cells = np.array([[row[name] for name in named] for row in table.rows], dtype=object)
        encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan).fit(cells[train])
        x = np.hstack([encoder.transform(cells), numbers])
        categorical = [len(found) <= CATEGORIES for found in encoder.categories_] + categorical
    model = HistGradientBoostingRegressor(categorical_features=categorical, random_state=0)
    return np.asarray(model.fit(x[train], table.values()[train]).predict(x[test]))
