"""Probabilities of words, recalibrated on held-out words: the scale is found, and no order changes."""

import math

import numpy as np
import pytest
import torch
from support.numerics import assert_close

from cqwen_dist.heads.intervals import UNCHANGED, Intervals, WordScale
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.training.evaluation.word_calibration import fit_word_scale, probability, word_calibration

TRUE = WordScale(400.0, 2000.0)


def words(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Strengths whose frequencies follow TRUE: said without a scale, nearly all of them are 0 or 1."""
    draw = np.random.default_rng(0)
    z = draw.normal(800, 4000, count)
    return z, draw.random(count) < probability(z, TRUE), np.arange(count) // 20


def test_the_fit_finds_the_scale_and_mends_the_error_on_other_words() -> None:
    z, right, texts = words(20_000)
    metrics, found = word_calibration(z, right, texts)
    assert metrics["eval/ece"] > 0.15
    assert metrics["eval/ece_calibrated"] < 0.02  # 1,300 words a bin: a standard error of 0.014
    assert found.factor == pytest.approx(TRUE.factor, rel=0.3)  # the grid has steps of 33 %
    assert found.shift == pytest.approx(TRUE.shift, abs=400)  # and of a fortieth of the strengths


@pytest.mark.parametrize("right", [np.zeros(5, bool), np.ones(5, bool), np.zeros(0, bool)])
def test_nothing_is_learnt_from_words_that_are_all_alike(right: np.ndarray) -> None:
    assert fit_word_scale(np.arange(float(len(right))), right) == UNCHANGED


def test_scores_and_probabilities_are_shown_alike_and_keep_their_order() -> None:
    draw = torch.Generator().manual_seed(0)
    scores = Cauchy(torch.randn(50, generator=draw).double(), torch.rand(50, generator=draw).double() + 0.1)
    scale = WordScale(0.7, 3.0)
    shown = scale.shown(scores.sf(0.2))
    assert_close(
        shown, scale.law(scores).sf(torch.tensor(0.2).double()), 1e-7
    )  # the tangent of a P near 1 loses digits
    assert torch.equal(shown.argsort(), scores.sf(0.2).argsort())
    assert torch.equal(UNCHANGED.shown(shown), shown)


def test_the_scale_is_saved_with_the_intervals_and_an_impossible_one_refused() -> None:
    known = Intervals({0.9: 2.0}, 7, 0.25, WordScale(1.5, 20.0))
    assert Intervals.from_dict(known.to_dict()) == known
    for broken in ({"shift": math.nan, "factor": 1.0}, {"shift": 0.0, "factor": 0.0}):
        with pytest.raises(ValueError, match="a factor above 0"):
            Intervals.from_dict({**known.to_dict(), "words": broken})
