"""Inference heads against the materialised scores."""

import math

import pytest
import torch
from support.numerics import assert_best, ovr_prob_at, ovr_prob_sum, ovr_top_word

from cqwen_dist import tiles
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import linear_ovr


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


@pytest.mark.usefixtures("chunks")
def test_slices_merge_to_the_whole():
    inputs = head()
    whole = ovr_top_word(*inputs, used_rows=290)
    assert whole.word.max() < 290
    parts = []
    for v0, v1 in ((0, 100), (100, 299), (299, 300)):
        cut = [*inputs[:2], *(t[v0:v1] for t in inputs[2:])]
        parts.append(ovr_top_word(*cut, vocab_start=v0, used_rows=290))
    assert (parts[2].word == -1).all()
    assert (parts[2].score == -math.inf).all()
    best = torch.stack([part.score for part in parts]).max(0)
    torch.testing.assert_close(best.values, whole.score)
    law = materialised(*inputs)
    for words in (whole.word, torch.stack([part.word for part in parts]).gather(0, best.indices[None])[0]):
        assert_best(words, ((law.loc - inputs[4]) / law.scale)[:, :290], 1e-4)


def test_probs_are_differentiable():
    inputs = head(dtype=torch.float64)
    words = torch.tensor([107, 103])
    found = ovr_prob_at(*inputs[:2], *(t[100:] for t in inputs[2:]), words, vocab_start=100)
    torch.testing.assert_close(found, materialised(*inputs).sf(inputs[4])[:, words])
    leaves = [t[:9].requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(lambda *t: ovr_prob_at(*t, torch.tensor([3, 0])), leaves)
    scalar = ovr_prob_at(*inputs[:3], None, 0.5, words)
    assert scalar.shape == (6, 2)


@pytest.mark.usefixtures("chunks")
def test_prob_sum_equals_the_losss():
    inputs = head()
    expected = materialised(*inputs).sf(inputs[4])
    torch.testing.assert_close(ovr_prob_sum(*inputs), expected.sum(1))
    labels = torch.arange(6)
    out = linear_ovr(*inputs, labels, want_prob_sum=True, used_rows=250)
    torch.testing.assert_close(out.prob_sum, expected[:, :250].sum(1))
    torch.testing.assert_close(ovr_prob_sum(*inputs, used_rows=250), out.prob_sum)


@pytest.mark.usefixtures("chunks")
def test_bf16_tokens_lose_nothing_after_the_product():
    """Logits of 15 against scales of 1e-3, as calibrated: rounded to bf16 they are 1/16 apart, and P is off by half.

    A logit's 896 terms are 90 together: one after another they are off by 1e-5 or so, z by 0.01, P by 0.003."""
    make = torch.Generator().manual_seed(0)
    weight = torch.randn(500, 896, generator=make) * 0.0156
    loc_u = torch.randn(64, 896, generator=make)
    loc_u = (loc_u * 15 / (loc_u @ weight.T).amax(1, keepdim=True)).bfloat16()
    inputs = [loc_u, torch.full_like(loc_u, 1e-4), weight.bfloat16(), None, torch.tensor(15.0)]
    exact = [t if t is None else t.double() for t in inputs]
    found, expected = ovr_top_word(*inputs), ovr_top_word(*exact)
    law = materialised(*exact)
    assert_best(found.word, (law.loc - 15.0) / law.scale, 0.1)
    torch.testing.assert_close(found.score, expected.score, rtol=1e-3, atol=0.1)
    words = expected.word
    p = ovr_prob_at(*inputs, words).diagonal()
    torch.testing.assert_close(p.double(), ovr_prob_at(*exact, words).diagonal(), rtol=0.0, atol=0.03)
