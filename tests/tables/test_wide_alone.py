"""The wide part without a base, as `cqwen fit` compares it."""

import numpy as np
import pytest

from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.tables.judging import WIDE_ALONE
from cqwen_dist.tables.wide.wide_alone import half_widths, wide_alone

DRAW = np.random.default_rng(0)
CITIES = DRAW.choice(["Rome", "Oslo", "Bonn"], 160)
AGES = DRAW.integers(10, 50, 160)
PROMPTS = [f"city: {city}\nage: {age}\nscore: " for city, age in zip(CITIES, AGES, strict=True)]
VALUES = AGES + 40.0 * (CITIES == "Rome") + DRAW.normal(0, 2.0, 160)
LEARNT, TEST = np.arange(100), np.arange(100, 160)
SIZE = {"columns": 2**12, "random_features": 64}


@pytest.fixture(scope="module")
def tokenizer() -> NumericalAwareTokenizer:
    return NumericalAwareTokenizer(train_tokenizer(PROMPTS, 320))


@pytest.mark.parametrize("by_log", [False, True])
def test_it_predicts_new_rows_with_intervals_that_hold(tokenizer: NumericalAwareTokenizer, by_log: bool) -> None:
    found = wide_alone(tokenizer, PROMPTS, VALUES, LEARNT, TEST, by_log, **SIZE)
    assert found.name == WIDE_ALONE
    error = np.abs(found.predicted - VALUES[TEST])
    assert error.mean() < np.abs(np.median(VALUES[LEARNT]) - VALUES[TEST]).mean() / 3
    low, high = found.ends.T
    assert np.all((low <= found.predicted) & (found.predicted <= high))
    assert 0.8 <= np.mean((low <= VALUES[TEST]) & (VALUES[TEST] <= high)) < 1


def test_with_too_few_rows_it_is_the_median(tokenizer: NumericalAwareTokenizer) -> None:
    found = wide_alone(tokenizer, PROMPTS, VALUES, LEARNT[:20], TEST, False, **SIZE)
    middle = np.median(VALUES[:20])
    np.testing.assert_allclose(found.predicted, middle)
    nineteenth = np.sort(np.abs(VALUES[:20] - middle))[18]  # of 20: ceil(0.9 * 21)
    np.testing.assert_allclose(found.ends, np.tile([middle - nineteenth, middle + nineteenth], (60, 1)))


def test_predictions_are_held_near_the_range_that_was_learnt(tokenizer: NumericalAwareTokenizer) -> None:
    far = [*PROMPTS[:-1], "city: Rome\nage: 5000\nscore: "]
    found = wide_alone(tokenizer, far, VALUES, LEARNT, TEST, False, **SIZE)
    low, high = VALUES[LEARNT].min(), VALUES[LEARNT].max()
    assert low - 0.25 * (high - low) <= found.predicted[-1] <= high + 0.25 * (high - low)
    assert np.all(found.ends >= low - (high - low))
    assert np.all(found.ends <= high + (high - low))


def test_intervals_hold_for_small_and_large_numbers_alike() -> None:
    """Errors grow with the number. One width for all would hold nearly always for the small, rarely for the large."""
    draw = np.random.default_rng(2)
    known, asked = draw.uniform(1, 10, (2, 2000))
    errors, new = known * np.abs(draw.normal(size=2000)), asked * np.abs(draw.normal(size=2000))
    half = half_widths(known, errors, asked)
    for some in (asked < 4, asked > 7):
        assert 0.85 < np.mean(new[some] <= half[some]) < 0.96
        assert not 0.85 < np.mean(new[some] <= np.quantile(errors, 0.9)) < 0.96
    few = half_widths(known[:30], errors[:30], asked)
    assert np.all(few == np.sort(errors[:30])[27]), "few rows have one width: that of the 28th of 30"
