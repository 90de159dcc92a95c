"""Heads on features that stay: what they learn."""

import numpy as np
import pytest
import torch

from benchmarks.numbers.competitors import Stored, digits, learnt, pinball, squared_error


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
