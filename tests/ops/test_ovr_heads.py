"""Inference heads against the materialised scores."""

import math

import pytest
import torch
from support.numerics import assert_best, ovr_prob_at, ovr_top_word

from cqwen_dist import tiles
from cqwen_dist.ops.cauchy import Cauchy


def head(n=6, c=8, v=300, seed=0, dtype=torch.float32):
    make = torch.Generator().manual_seed(seed)
    loc_u, weight = torch.randn(n, c, generator=make), torch.randn(v, c, generator=make)
    scale_u = torch.rand(n, c, generator=make) + 0.1
    bias, threshold = torch.randn(v, generator=make), torch.randn(v, generator=make)
    return [t.to(dtype) for t in (loc_u, scale_u, weight)] + [bias.to(dtype), threshold.to(dtype)]


@pytest.fixture(params=[1 << 23, 1 << 10], ids=["one chunk", "many chunks"])
def chunks(request, monkeypatch):
    monkeypatch.setitem(tiles.CHUNK_BYTES, "cpu", request.param)


def materialised(loc_u, scale_u, weight, bias, threshold):
    return Cauchy(loc_u, scale_u).affine(weight, bias)


@pytest.mark.usefixtures("chunks")
def test_the_best_word_has_the_largest_score():
    inputs = head(n=100)
    s = materialised(*inputs)
    best = ovr_top_word(*inputs)
    torch.testing.assert_close(best.score, ((s.loc - inputs[4]) / s.scale).amax(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(best.loc, s.loc.gather(1, best.word[:, None])[:, 0], rtol=1e-4, atol=1e-5)
    p = torch.atan2(torch.ones_like(best.score), -best.score) / math.pi
    torch.testing.assert_close(p, s.sf(inputs[4]).amax(1), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="scale_u"):
        ovr_top_word(inputs[0], inputs[1][:, 1:], *inputs[2:])
    by_loc = ovr_top_word(*inputs, rank_by="loc")
    torch.testing.assert_close(by_loc.score, s.loc.amax(1), rtol=1e-5, atol=1e-5)
    assert_best(by_loc.word, s.loc)


@pytest.mark.usefixtures("chunks")
def test_scale_zero_ranks_by_loc():
    inputs = head()
    inputs[1] = torch.zeros_like(inputs[1])
    s = materialised(*inputs)
    best = ovr_top_word(*inputs)
    above = torch.where(s.loc > inputs[4], s.loc, -math.inf)  # P = 1: told apart by loc
    assert (best.score == math.inf).all()
    assert_best(best.word, above)
    for bias, score, word in (([-1.0, 0.0, -2.0], 0.0, 1), ([-1.0, -3.0, -0.5], -math.inf, 2)):
        found = ovr_top_word(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(3, 2), torch.tensor(bias), 0.0)
        assert (found.score.item(), found.word.item()) == (score, word)


def test_probs_are_differentiable():
    inputs = head(dtype=torch.float64)
    words = torch.tensor([107, 103])
    found = ovr_prob_at(*inputs[:2], *(t[100:] for t in inputs[2:]), words, vocab_start=100)
    torch.testing.assert_close(found, materialised(*inputs).sf(inputs[4])[:, words])
    leaves = [t[:9].requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(lambda *t: ovr_prob_at(*t, torch.tensor([3, 0])), leaves)
    scalar = ovr_prob_at(*inputs[:3], None, 0.5, words)
    assert scalar.shape == (6, 2)
