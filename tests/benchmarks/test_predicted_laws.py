"""Scores of predicted laws, and which law the errors have."""

from statistics import NormalDist

import numpy as np
import pytest
import torch

from benchmarks.numbers.competitors import Stored, digits, learnt, pinball, squared_error
from benchmarks.numbers.predicted_laws import QUANTILES, Predicted, laws


def test_the_crps_of_a_point_is_the_absolute_error() -> None:
    truth = np.random.default_rng(0).normal(size=50)
    found = Predicted(np.zeros((50, 7))).scores(truth)
    assert found["crps"] == pytest.approx(found["mae"]) == pytest.approx(np.abs(truth).mean())
    assert not {"coverage_90", "width_90"} & set(found), "it has no interval"


def test_true_quantiles_give_the_crps_and_90_percent_coverage() -> None:
    """The CRPS of a normal law is sigma / sqrt(pi); seven quantiles come within 5 %, 20,000 draws within 1 %."""
    truth = np.random.default_rng(0).normal(3.0, 2.0, 20_000)
    quantiles = np.array([NormalDist(3.0, 2.0).inv_cdf(at) for at in QUANTILES])
    found = Predicted(np.tile(quantiles, (len(truth), 1))).scores(truth)
    assert found["crps"] == pytest.approx(2.0 / np.sqrt(np.pi), rel=0.06)
    assert found["coverage_90"] == pytest.approx(0.9, abs=0.01)
    assert found["width_90"] == pytest.approx(2 * 2.0 * 1.6449, rel=1e-3)


@pytest.mark.parametrize(("name", "draw"), [("Cauchy", "standard_cauchy"), ("Laplace", "laplace"), ("Gauss", "normal")])
def test_samples_are_likeliest_under_their_own_law(name: str, draw: str) -> None:
    error = getattr(np.random.default_rng(1), draw)(size=2000)
    found = laws(error)
    others = [of["log_likelihood"] for law, of in found.items() if law not in (name, "Student t")]
    assert found[name]["log_likelihood"] > max(others)
    assert found[name]["coverage_90"] == pytest.approx(0.9, abs=0.03)


@pytest.mark.slow
def test_heads_learn_a_function_of_the_features() -> None:
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(400, 6, generator=draw)
    y = (100 + 20 * z[:, 0] + 5 * torch.randn(400, generator=draw)).double().numpy()
    train, valid, test = np.arange(200), np.arange(200, 250), np.arange(250, 400)
    stored = Stored(z, train)
    found = learnt(squared_error(y, train), [stored], train, valid, test)
    assert found.scores(y[test])["rmse"] < 8  # 5 is the noise, 20 what can be told
    ends = found.quantiles[:, [0, -1]] @ [-1, 1] / (2 * 1.96)
    assert 4 < ends.min() <= ends.max() < 8, "the spread"
    for arm in (pinball, digits):
        scores = learnt(arm(y, train), [stored], train, valid, test).scores(y[test])
        assert scores["rmse"] < 10
        assert 0.75 < scores["coverage_90"] < 0.98
