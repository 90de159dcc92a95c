"""The baselines find what is there to find, and nothing breaks on what a table may hold."""

import tracemalloc
from importlib.util import find_spec

import numpy as np
import pytest

from cqwen_dist.tables.baselines import baselines, natural_boosting
from cqwen_dist.tables.benchmark.predicted_laws import Predicted
from cqwen_dist.tables.fitting import errors
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
    return {name: errors(p, truth)["r2"] for name, p in baselines(found, TRAIN, TEST, texts)}


def test_each_baseline_explains_what_it_can_read() -> None:
    found = r2(table(True, True))
    assert found["always the median"] <= 0
    assert 0.8 < found["ridge, numeric columns"] < 0.995, "it does not see the city"
    assert found["ridge, TF-IDF and one-hot"] > found["ridge, numeric columns"]
    assert found["gradient boosting"] > 0.8
    words, pairs = found["ridge, TF-IDF and one-hot"], found["ridge, TF-IDF of words and pairs"]
    assert words > pairs, "an age is a word there, of a few rows"


def test_baselines_handle_tables_of_only_words_or_numbers() -> None:
    words = r2(table(False, True))
    assert "ridge, numeric columns" not in words
    assert words["ridge, TF-IDF and one-hot"] > 0.9
    assert words["ridge, TF-IDF of words and pairs"] > 0.9
    assert r2(table(True, False))["ridge, numeric columns"] > 0.9


def test_many_rows_need_no_quadratic_memory() -> None:
    draw = np.random.default_rng(0)
    words = [f"w{i:04}" for i in range(9000)]
    rows = [{"name": " ".join(draw.choice(words, 6)), "score": str(i % 7)} for i in range(6000)]
    texts = [row["name"] + (" seven" * (row["score"] == "6")) for row in rows]
    learnt, judged = np.arange(5000), np.arange(5000, 6000)
    tracemalloc.start()
    found = dict(baselines(Table(["name"], [], rows, "score", []), learnt, judged, texts))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6, "[5000, 5000] are 200 MB"
    truth = np.array([i % 7 for i in judged])
    assert errors(found["ridge, TF-IDF of words and pairs"], truth)["r2"] > 0.2


def test_prompts_without_words_get_no_text_baseline() -> None:
    rows = [{"x": str(i % 10), "score": str(i)} for i in range(200)]
    names = {name for name, _ in baselines(Table(["x"], ["x"], rows, "score", []), TRAIN, TEST, [r["x"] for r in rows])}
    assert names - {"CatBoost"} == {"always the median", "ridge, numeric columns", "gradient boosting"}


@pytest.mark.skipif(find_spec("catboost") is None, reason="catboost is not installed")
@pytest.mark.parametrize("kinds", [(True, True), (False, True), (True, False)])
def test_catboost_is_compared_if_installed(kinds: tuple[bool, bool]) -> None:
    assert r2(table(*kinds))["CatBoost"] > 0.8


@pytest.mark.skipif(find_spec("ngboost") is None, reason="ngboost is not installed")
@pytest.mark.parametrize("kinds", [(True, True), (False, True), (True, False)])
def test_ngboost_gives_a_normal_law_if_installed(kinds: tuple[bool, bool]) -> None:
    found = table(*kinds)
    law = natural_boosting(found, TRAIN, TEST)
    assert law is not None
    truth = found.values()[TEST]
    scores = Predicted.normal(*law, truth).scores(truth)
    assert scores["r2"] > 0.8
    assert np.isfinite(scores["log_likelihood"])


@pytest.mark.skipif(find_spec("ngboost") is not None, reason="ngboost is installed")
def test_without_ngboost_its_law_is_missing() -> None:
    assert natural_boosting(table(True, True), TRAIN, TEST) is None


def test_errors_equal_the_textbook_formulas() -> None:
    found = errors(np.array([1.0, 2.0, 6.0]), np.array([1.0, 3.0, 2.0]))
    assert found["mae"] == 5 / 3
    assert found["rmse"] == np.sqrt(17 / 3)
    assert found["mdae"] == 1.0
    assert abs(found["r2"] - (1 - 17 / 2)) < 1e-12
