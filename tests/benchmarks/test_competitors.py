"""Heads on features that stay and on those of a base with adapters: what they learn, and what does not move."""

import numpy as np
import torch

from benchmarks.numbers import digits_as_text as digit_text
from benchmarks.numbers.competitors import Stored, digits, learnt, pinball, squared_error


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


def test_words_are_sampled_by_probability() -> None:
    torch.manual_seed(0)
    p = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2, 0.0], [0.25, 0.0, 0.0, 0.0, 0.0, 0.75]])
    at = torch.tensor([[0, 1]]).repeat(3, 20_000)
    drawn = digit_text._drawn(p.expand(3, -1, -1), at)
    for node, law in enumerate(p):
        found = drawn[at == node].bincount(minlength=6) / 60_000
        torch.testing.assert_close(found, law, atol=0.01, rtol=0)  # five standard errors
        assert not found[law == 0].any()
