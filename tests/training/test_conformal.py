"""Recalibrated intervals hold what they promise, for every predicted size, on laws that are no Cauchy; and which texts
calibrate."""

import json
import math

import numpy as np
import pytest
import torch
from support.numerics import assert_close

from cqwen_dist.heads.intervals import LEVELS, UNCHANGED, Intervals, WordScale, number_interval
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.training.evaluation.number_metrics import (
    Numbers,
    for_calibration,
    interval_factors,
    number_metrics,
)
from cqwen_dist.training.evaluation.word_calibration import fit_word_scale, probability, word_calibration


def at(loc: np.ndarray) -> Cauchy:
    return Cauchy(torch.from_numpy(loc), torch.ones(len(loc)))


@pytest.mark.parametrize("noise", ["normal", "cauchy", "lognormal"])
def test_coverage_equals_the_level_for_any_law(noise: str) -> None:
    """Mean over 400 repetitions of 99 calibration and 99 new numbers: level <= coverage <= level + 1/100."""
    rng = np.random.default_rng(0)
    laws = {"normal": rng.standard_normal, "cauchy": rng.standard_cauchy, "lognormal": lambda s: rng.lognormal(0, 2, s)}
    scores = np.abs(laws[noise]((400, 198)))
    for level in (0.5, 0.9, 0.95):
        held = []
        for row in scores:
            (factor,) = interval_factors(row[:99], at(np.zeros(99)), (level,)).factors[level]
            held.append((row[99:] <= factor * Cauchy.half_width(level)).mean())
        # the standard error of the mean is sqrt(2 level (1 - level) / 99 / 400) = 0.0036 at level 0.5
        assert level - 0.012 <= np.mean(held) <= level + 0.01 + 0.012


def test_a_factor_is_an_order_statistic_divided_by_the_cauchys_width() -> None:
    found = interval_factors(np.array([3.0, 1.0, 2.0, 4.0]), at(np.arange(4.0)), (0.5, 0.8, 0.9))
    assert found.factors == {0.5: (3.0 / Cauchy.half_width(0.5),), 0.8: (4.0 / Cauchy.half_width(0.8),)}
    assert found.n == 4
    assert 0.9 not in found.factors, "4 numbers cannot promise 90 %: ceil(5 * 0.9) = 5 > 4"
    assert interval_factors(np.zeros(0), at(np.zeros(0))).factors == {}
    assert Intervals.from_dict(found.to_dict()) == found


def test_no_inner_interval_is_wider_than_an_outer_one() -> None:
    """7 numbers give 0.5 a factor and leave 0.9 and 0.95 raw."""
    found = interval_factors(np.full(7, 8.0), at(np.zeros(7)))
    assert list(found.factors) == [0.5]
    widths = [float(found.half_width(level, at(np.zeros(1)))) for level in LEVELS]
    assert widths == pytest.approx([8.0, 8.0, Cauchy.half_width(0.95)])


def uneven(draw: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(predicted sizes, scores): errors grow fivefold over the sizes, and the scale does not know."""
    loc = draw.random(count)
    return loc, np.abs(draw.standard_normal(count)) * 5**loc


def test_intervals_hold_for_every_predicted_size_where_one_factor_fails() -> None:
    """Means over 100 draws of 400 held-out numbers. In the last of five blocks errors grow by 5^(1/5). In the upper
    tenth they are 5^0.05 times those in the block's middle: P(|N| < 1.645 / 1.08) = 0.871. One factor holds 0.68."""
    draw, held = np.random.default_rng(0), {0.5: [], 0.9: [], 0.95: []}
    for _ in range(100):
        loc, scores = uneven(draw, 400)
        found = interval_factors(scores, at(loc))
        assert [len(each) for each in found.factors.values()] == [5] * 3
        loc, scores = uneven(draw, 4000)
        widths = [found.half_width(level, at(loc)).numpy() for level in LEVELS]
        assert (np.diff(widths, axis=0) > 0).all(), "50 % inside 90 % inside 95 %"
        tenths = np.minimum((10 * loc).astype(int), 9)
        for level, width in zip(LEVELS, widths, strict=True):
            held[level].append(np.bincount(tenths, scores <= width) / np.bincount(tenths))
    # 100 draws of blocks of 80: a standard error of 0.3 %, and 1 / 81 above the level at most
    mean = {level: np.mean(each, 0) for level, each in held.items()}
    assert 0.85 < mean[0.9].min() < mean[0.9].max() < 0.95
    assert 0.91 < mean[0.95].min() < mean[0.95].max() < 0.985
    for level in LEVELS:
        assert level - 0.01 < mean[level].mean() < level + 0.02


@pytest.mark.parametrize("law", ["cauchy", "laplace", "student-4"])
@pytest.mark.parametrize("name", ["standardise", "standardise_log"])
def test_ends_hold_by_size_for_every_law_and_unit(law: str, name: str) -> None:
    """5,000 numbers calibrate ten blocks, 20,000 others are judged in the raw unit. A tenth's share has a standard
    deviation of 1.4 % from the 500 numbers of its block and 0.7 % from its own 2,000; 3.5 of both together."""
    draw, unit = np.random.default_rng(3), TargetTransform(name, 5.0, 0.5, law=law)
    loc, scores = uneven(draw, 25_000)
    scale = draw.uniform(0.1, 0.2, 25_000)
    true = unit.inverse(torch.from_numpy(loc + scale * scores * draw.choice([-1, 1], 25_000))).numpy()
    some, other = np.arange(5000), np.arange(5000, 25_000)
    known = number_metrics(Numbers(true[some], loc[some], scale[some], some), unit, None)[1]
    assert len(known.edges) == 9
    y = unit.kind(*(torch.from_numpy(part[other]) for part in (loc, scale)))
    for level in LEVELS:
        low, high = (end.numpy() for end in number_interval(y, unit, known, level))
        inside = (low <= true[other]) & (true[other] <= high)
        held = [inside[part].mean() for part in np.array_split(np.argsort(loc[other]), 10)]
        off = 3.5 * math.sqrt(level * (1 - level) * (1 / 500 + 1 / 2000))
        assert held == pytest.approx([level] * 10, abs=off)


def test_a_block_has_the_quantile_of_its_own_scores_and_its_edge_belongs_to_none() -> None:
    loc = np.random.default_rng(0).permutation(200.0 + np.arange(200))
    found = interval_factors(loc, at(loc), (0.9,))
    assert found.edges == (300.0,), "the middle one"
    # 100 below: ceil(90.9) = the 91st. 99 above, without 300: ceil(90) = the 90th of 301 and more
    assert found.factors[0.9] == (290.0 / Cauchy.half_width(0.9), 390.0 / Cauchy.half_width(0.9))
    width = found.half_width(0.9, at(np.array([-1e9, 299.9, 300.0, 1e9])))
    assert width.tolist() == pytest.approx([290.0, 290.0, 390.0, 390.0], rel=1e-15)
    assert found.half_width(0.5, at(loc)).unique().tolist() == [Cauchy.half_width(0.5)], "no factor was measured"


@pytest.mark.parametrize(("count", "blocks"), [(20, 1), (159, 1), (160, 2), (400, 5), (5000, 10)])
def test_few_numbers_are_one_block_and_many_are_ten(count: int, blocks: int) -> None:
    loc, scores = uneven(np.random.default_rng(0), count)
    found = interval_factors(scores, at(loc))
    assert len(found.edges) + 1 == blocks
    assert Intervals.from_dict(json.loads(json.dumps(found.to_dict()))) == found, "to the bit"
    rounded = interval_factors(scores, at(np.round(loc)))
    assert rounded.edges == ((1.0,) if blocks > 1 else ()), "equal predictions are in one block"
    assert interval_factors(scores, at(np.zeros(count))).edges == ()


def test_edges_without_their_factors_are_refused() -> None:
    known = Intervals({0.9: (2.0, 1.0)}, 200, edges=(0.5,)).to_dict()
    for broken in ({"edges": []}, {"edges": [0.5, 0.7]}, {"levels": {"0.9": [1.0, 2.0, 3.0]}, "edges": [0.7, 0.5]}):
        with pytest.raises(ValueError, match="one more of them than edges"):
            Intervals.from_dict({**known, **broken})


def test_the_calibrating_half_is_spread_evenly_not_by_parity() -> None:
    chosen = for_calibration(np.arange(10_000))
    assert abs(chosen.mean() - 0.5) < 0.001
    for step in (2, 3, 4, 5, 7, 8):
        for first in range(step):
            assert abs(chosen[first::step].mean() - 0.5) < 0.02, (first, step)
    assert 20 <= for_calibration(np.arange(50)).sum() <= 30


def numbers(count: int = 4000) -> tuple[Numbers, TargetTransform]:
    """Light-tailed truths under a Cauchy prediction, four numbers a text."""
    draw = np.random.default_rng(2)
    target = TargetTransform("standardise", 100.0, 20.0)
    loc = draw.standard_normal(count)
    truth = (loc + 0.5 * draw.standard_normal(count)) * 20.0 + 100.0
    return Numbers(truth, loc, np.full(count, 0.3), np.arange(count) // 4), target


def test_coverage_is_cross_validated_and_factors_use_all_numbers() -> None:
    data, target = numbers()
    metrics, factors, drawn = number_metrics(data, target, 100.0, Intervals({0.9: (1.0,)}, 7))
    assert metrics["eval/coverage_90"] > 0.99, "the Cauchy's own interval is too wide"
    count = int(metrics["eval/conformal_numbers"])
    assert count == factors.n == len(data.true)
    for level in (50, 90, 95):
        held = metrics[f"eval/coverage_{level}_conformal"]
        first = for_calibration(data.text)
        scores = np.abs((data.true - 100) / 20 - data.loc) / data.scale
        parts = [
            scores[own]
            <= interval_factors(scores[~own], at(data.loc[~own]), (level / 100,))
            .half_width(level / 100, at(data.loc[own]))
            .numpy()
            for own in (first, ~first)
        ]
        assert held == pytest.approx(np.concatenate(parts).mean())
        off = abs(held - level / 100)
        assert off < 2.6 * math.sqrt(2 * level / 100 * (1 - level / 100) / count), level
    assert metrics["eval/coverage_90_known"] == metrics["eval/coverage_90"], "a factor of 1 is raw"
    # 1.645 sigma each side, sigma = 0.5 in the target's unit, 20 raw
    assert metrics["eval/width_90_conformal"] == pytest.approx(2 * 1.645 * 0.5 * 20, rel=0.05)
    assert metrics["eval/width_90"] == pytest.approx(2 * math.tan(0.45 * math.pi) * 0.3 * 20)
    assert metrics["eval/reg_mdae"] == pytest.approx(0.6745 * 10, rel=0.05)
    assert metrics["eval/baseline_mdae"] == pytest.approx(np.median(np.abs(data.true - 100)))
    assert metrics["eval/crps"] == pytest.approx(20 * metrics["eval/crps_target"])
    assert sum(drawn["pit"]) == drawn["count"] == 4000
    assert len(drawn["true"]) == len(drawn["low"]) == 1000
    assert all(low <= p <= high for low, p, high in zip(drawn["low"], drawn["predicted"], drawn["high"], strict=True))


def test_a_log_target_has_a_crps_only_in_its_own_unit() -> None:
    data, _ = numbers(100)
    metrics, _, _ = number_metrics(data, TargetTransform("signed_log"), None)
    assert "eval/crps_target" in metrics
    assert "eval/crps" not in metrics, "the raw law is a log-Cauchy: its CRPS is infinite"
    assert all(math.isfinite(value) for value in metrics.values())


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
    known = Intervals({0.9: (2.0,)}, 7, 0.25, WordScale(1.5, 20.0))
    assert Intervals.from_dict(known.to_dict()) == known
    for broken in ({"shift": math.nan, "factor": 1.0}, {"shift": 0.0, "factor": 0.0}):
        with pytest.raises(ValueError, match="a factor above 0"):
            Intervals.from_dict({**known.to_dict(), "words": broken})
