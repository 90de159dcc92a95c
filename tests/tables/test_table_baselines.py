"""The baselines find what is there to find, and nothing breaks on what a table may hold."""

from datetime import date, timedelta
from itertools import islice

import numpy as np

from cqwen_dist.tables.baselines import EncodedRows, baselines, date_parts
from cqwen_dist.tables.judging import errors
from cqwen_dist.tables.rows import Table

TRAIN, TEST = np.arange(160), np.arange(160, 200)


def table(with_numbers: bool, with_words: bool) -> Table:
    """score = 3 age + 10 where the city is Rome; an age is missing here and there, a city unseen in the test rows."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(200):
        city = "Nowhere" if i == 199 else ("Rome", "Oslo", "Bern")[i % 3]
        age = int(rng.integers(20, 80))
        row = {"score": str(3 * age * with_numbers + 10 * (city == "Rome") * with_words + 0.01 * i)}
        row |= {"age": "" if i % 50 == 7 else str(age)} if with_numbers else {}
        row |= {"city": city} if with_words else {}
        rows.append(row)
    names = ["age"] * with_numbers + ["city"] * with_words
    return Table(names, ["age"] * with_numbers, rows, "score", [])


def r2(found: Table) -> dict[str, float]:
    texts = [" ".join(row[name] for name in found.columns) for row in found.rows]
    truth = found.values()[TEST]
    return {rival.name: errors(rival.predicted, truth)["r2"] for rival in baselines(found, TRAIN, TEST, texts)}


def test_each_baseline_explains_what_it_can_read() -> None:
    found = r2(table(True, True))
    assert found["always the median"] <= 0
    assert 0.8 < found["ridge, numeric columns"] < 0.995, "it does not see the city"
    assert found["ridge, TF-IDF and one-hot"] > found["ridge, numeric columns"]
    assert found["gradient boosting"] > 0.8
    words, pairs = found["ridge, TF-IDF and one-hot"], found["ridge, TF-IDF of words and pairs"]
    assert words > pairs, "an age is a word there, of a few rows"


def test_numbers_as_large_as_they_get_harm_no_model() -> None:
    """Maps write the least float64 where nothing is known. Its square is infinite, and so is it in float32."""
    odd = table(True, True)
    for row in odd.rows[3::20]:
        row["age"] = "-1.7976931348623157e+308"
    assert all(np.isfinite(score) for score in r2(odd).values())


def test_baselines_handle_tables_of_only_words_or_numbers() -> None:
    words = r2(table(False, True))
    assert "ridge, numeric columns" not in words
    assert words["ridge, TF-IDF and one-hot"] > 0.9
    assert words["ridge, TF-IDF of words and pairs"] > 0.9
    assert r2(table(True, False))["ridge, numeric columns"] > 0.9


def test_a_skewed_target_is_fitted_as_logarithms_and_to_the_absolute_error() -> None:
    """price = 10^(x + noise of a Cauchy law): squares of raw prices see a few rows only."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 3, 200)
    prices = 10 ** (1 + x + 0.1 * np.abs(rng.standard_cauchy(200)).clip(max=30))
    rows = [{"x": f"{a:.4f}", "price": f"{p:.6g}"} for a, p in zip(x, prices, strict=True)]
    found = Table(["x"], ["x"], rows, "price", [])
    truth = found.values()[TEST]
    lost = {}
    for by_log in (False, True):
        _, ridge = islice(baselines(found, TRAIN, TEST, [""] * 200, by_log), 2)
        assert ridge.name == "ridge, numeric columns"
        assert ridge.fitted_to == "absolute error", "outliers pull the squares"
        lost[by_log] = np.median(np.abs(np.log(ridge.predicted.clip(1e-3) / truth)))
    assert lost[True] < 0.5 * lost[False]


def test_predictions_of_baselines_are_held_near_the_training_range() -> None:
    rows = [{"x": str(i % 40), "price": f"{np.exp(0.2 * (i % 40)):.6g}"} for i in range(200)]
    rows[199]["x"] = "4000"
    found = Table(["x"], ["x"], rows, "price", [])
    _, ridge = islice(baselines(found, TRAIN, TEST, [""] * 200, True), 2)
    assert np.isfinite(ridge.predicted).all()
    assert ridge.predicted[-1] < 1e5, "e^800 by the fitted line"


def test_dates_become_numbers_and_rare_categories_share_a_column() -> None:
    days = [(date(2020, 1, 1) + timedelta(days=3 * i)).strftime("%d.%m.%Y") for i in range(200)]
    rows = [{"day": day, "city": "Rome" if i % 2 else f"only {i}", "score": str(i % 7)} for i, day in enumerate(days)]
    texts = [row["city"] for row in rows]
    found = EncodedRows(Table(["day", "city"], [], rows, "score", []), texts, np.arange(200.0), TRAIN)
    assert found.numbers[1].tolist() == [2020, 1, 4, 5, date(2020, 1, 4).toordinal()]
    assert found.linear.shape[1] < 160, "no column a cell"
    at = date_parts(["2024-02-29 12:30:00", "", "2024-03-01"], np.arange(3))
    assert at[0, -1] == 12.5
    assert np.isnan(at[1]).all()
    assert date_parts(["2024-02-29", "later"], np.arange(2)) is None
    assert date_parts(["", ""], np.arange(2)) is None


def test_errors_equal_the_textbook_formulas() -> None:
    found = errors(np.array([1.0, 2.0, 6.0]), np.array([1.0, 3.0, 2.0]))
    assert found["mae"] == 5 / 3
    assert found["rmse"] == np.sqrt(17 / 3)
    assert found["mdae"] == 1.0
    assert abs(found["r2"] - (1 - 17 / 2)) < 1e-12
