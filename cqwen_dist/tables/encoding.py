"""A table's rows as numbers for models that read no language: numbers, dates, categories and words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from cqwen_dist.data.recipes import LARGEST
from cqwen_dist.tables.rows import Table

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

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
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        if not self.numbers.shape[1]:
            return self.numbers
        steps = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True), StandardScaler()
        return np.asarray(make_pipeline(*steps).fit(self.numbers[self.learnt]).transform(self.numbers))

    def tf_idf(self, **options: Any) -> csr_matrix:
        """Sparse [n, words]: TF-IDF. options: of scikit-learn's vectorizer."""
        from sklearn.feature_extraction.text import TfidfVectorizer

        return TfidfVectorizer(**options).fit([self.texts[row] for row in self.learnt]).transform(self.texts)

    @cached_property
    def pairs(self) -> csr_matrix:
        """TF-IDF of words and pairs of words."""
        return self.tf_idf(ngram_range=(1, 2))

    @cached_property
    def characters(self) -> csr_matrix:
        """`pairs`, and TF-IDF of two to five characters within words: parts and other spellings of words."""
        from scipy.sparse import csr_matrix, hstack

        of_characters = {"analyzer": "char_wb", "ngram_range": (2, 5), "max_features": MOST_CHARACTERS}
        return csr_matrix(hstack([self.pairs, self.tf_idf(sublinear_tf=True, **of_characters)]))

    @cached_property
    def linear(self) -> csr_matrix:
        """For linear models: words, a column per category (rare ones share one), and `filled`."""
        from scipy.sparse import csr_matrix, hstack
        from sklearn.preprocessing import OneHotEncoder

        parts = [self.tf_idf(), csr_matrix(self.filled)] if self.has_words else [csr_matrix(self.filled)]
        if self.categories.shape[1]:
            encoder = OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=RARE)
            parts.append(encoder.fit(self.categories[self.learnt]).transform(self.categories))
        return csr_matrix(hstack(parts))

    @cached_property
    def components(self) -> np.ndarray:
        """[n, components] of `pairs`; without columns if there are no words."""
        from sklearn.decomposition import TruncatedSVD

        count = min(COMPONENTS, len(self.learnt) // 10) if self.has_words else 0
        count = min(count, self.pairs.shape[1] - 1) if count else 0
        if count < 1:
            return np.empty((len(self.y), 0))
        svd = TruncatedSVD(count, random_state=0).fit(self.pairs[self.learnt])
        return np.asarray(svd.transform(self.pairs))

    @cached_property
    def dense(self) -> np.ndarray:
        """For trees: `numbers`, each category as the mean target of its rows, and `components`; at least one column."""
        means = [mean_targets(cells, self.y, self.learnt) for cells in self.categories.T]
        numbers = np.where(np.isnan(self.numbers[self.learnt]).all(0), 0.0, self.numbers)  # histograms need numbers
        return np.column_stack([numbers, self.components, *means, np.zeros(len(self.y))])


def mean_targets(cells: np.ndarray, y: np.ndarray, learnt: np.ndarray) -> np.ndarray:
    """[n] the mean target of the training rows with the same cell, as if SMOOTHED further rows had the mean of all.

    A training row's own fold is left out, or the mean of a rare category would tell its target.
    """
    codes = np.unique(cells, return_inverse=True)[1]
    fold = np.full(len(y), -1)
    fold[np.random.default_rng(0).permutation(learnt)] = np.arange(len(learnt)) % ENCODED_FOLDS
    found = np.empty(len(y))
    for one in range(-1, ENCODED_FOLDS):
        others = learnt[fold[learnt] != one]
        sums, counts = (np.bincount(codes[others], of, codes.max() + 1) for of in (y[others], None))
        found[fold == one] = ((sums + SMOOTHED * y[others].mean()) / (counts + SMOOTHED))[codes[fold == one]]
    return found


def date_parts(cells: Sequence[str], learnt: np.ndarray) -> np.ndarray | None:
    """[n, 5 or 6] year, month, day, weekday, days since year 1, and the hour if any differs; NaN for other texts.

    None if a filled cell of the training rows is no date, or has a different form.
    """
    filled = [cells[row] for row in learnt if cells[row]]
    form = next((form for form in ("", *_DATES) if filled and all(_date(cell, form) for cell in filled)), None)
    if form is None:
        return None
    none = [np.nan] * 6
    parts = np.array([none if (at := _date(cell, form)) is None else _parts(at) for cell in cells])
    return parts if len(np.unique(parts[learnt, 5])) > 1 else parts[:, :5]


def _date(cell: str, form: str) -> datetime | None:
    try:
        return datetime.strptime(cell, form) if form else datetime.fromisoformat(cell) if "-" in cell else None
    except ValueError:
        return None


def _parts(at: datetime) -> list[float]:
    return [at.year, at.month, at.day, at.weekday(), at.toordinal(), at.hour + at.minute / 60]
