"""Inference heads against the materialised scores."""

import math

import pytest
import torch
from support.numerics import ovr_prob_at, ovr_prob_sum, ovr_topk

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import head as ovr_head
from cqwen_dist.ops.ovr import linear_ovr


def head(n=6, c=8, v=300, seed=0, dtype=torch.float32):
    make = torch.Generator().manual_seed(seed)
    loc_u, weight = torch.randn(n, c, generator=make), torch.randn(v, c, generator=make)
    scale_u = torch.rand(n, c, generator=make) + 0.1
    bias, threshold = torch.randn(v, generator=make), torch.randn(v, generator=make)
    return [t.to(dtype) for t in (loc_u, scale_u, weight)] + [bias.to(dtype), threshold.to(dtype)]


@pytest.fixture(params=[1 << 23, 1 << 10], ids=["one chunk", "many chunks"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(ovr_head, "CHUNK_BYTES", request.param)


def materialised(loc_u, scale_u, weight, bias, threshold):
    return Cauchy(loc_u, scale_u).affine(weight, bias)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("k", [1, 5, 300])
def test_topk(k):
    inputs = head()
    s = materialised(*inputs)
    z = (s.loc - inputs[4]) / s.scale
    scores, ids = ovr_topk(*inputs, k)
    expected = z.topk(k, 1)
    torch.testing.assert_close(scores, expected.values, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(z.gather(1, ids), expected.values, rtol=1e-4, atol=1e-5)
    p = torch.atan2(torch.ones_like(scores), -scores) / math.pi
    torch.testing.assert_close(p, s.sf(inputs[4]).gather(1, ids), rtol=1e-4, atol=1e-6)
    by_loc, ids = ovr_topk(*inputs, k, rank_by="loc")
    torch.testing.assert_close(by_loc, s.loc.topk(k, 1).values, rtol=1e-5, atol=1e-5)


def test_ranking_does_not_saturate():
    """P of both words is 1 in fp32; z tells them apart."""
    _, ids = ovr_topk(
        torch.tensor([[1.0]]), torch.tensor([[1e-9]]), torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 5.0]), 0.0
    )
    assert ids.item() == 1


@pytest.mark.usefixtures("chunks")
def test_scale_zero_ranks_by_loc():
    inputs = head()
    inputs[1] = torch.zeros_like(inputs[1])
    s = materialised(*inputs)
    scores, ids = ovr_topk(*inputs, 4)
    above = torch.where(s.loc > inputs[4], s.loc, -math.inf)  # P = 1: told apart by loc
    assert (scores == math.inf).all()
    assert torch.equal(ids, above.topk(4, 1).indices)
    on_it = ovr_topk(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(3, 2), torch.tensor([-1.0, 0.0, -2.0]), 0.0, 3)
    assert on_it[0].tolist() == [[0.0, -math.inf, -math.inf]]
    assert on_it[1].tolist() == [[1, 0, 2]]


@pytest.mark.usefixtures("chunks")
def test_slices_merge_to_the_whole_and_short_ones_fill_up():
    inputs = head()
    whole = ovr_topk(*inputs, 3, used_rows=290)
    assert whole[1].max() < 290
    parts = []
    for v0, v1 in ((0, 100), (100, 299), (299, 300)):
        cut = [*inputs[:2], *(t[v0:v1] for t in inputs[2:])]
        parts.append(ovr_topk(*cut, 3, vocab_start=v0, used_rows=290))
    assert (parts[2][1] == -1).all()
    assert (parts[2][0] == -math.inf).all()
    scores, ids = (torch.cat(ts, 1) for ts in zip(*parts, strict=True))
    best = scores.topk(3, 1)
    torch.testing.assert_close(best.values, whole[0])
    assert torch.equal(ids.gather(1, best.indices), whole[1])


def test_prob_at_is_differentiable():
    inputs = head(dtype=torch.float64)
    words = torch.tensor([107, 103])
    found = ovr_prob_at(*inputs[:2], *(t[100:] for t in inputs[2:]), words, vocab_start=100)
    torch.testing.assert_close(found, materialised(*inputs).sf(inputs[4])[:, words])
    leaves = [t[:9].requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(lambda *t: ovr_prob_at(*t, torch.tensor([3, 0])), leaves)
    scalar = ovr_prob_at(*inputs[:3], None, 0.5, words)
    assert scalar.shape == (6, 2)


@pytest.mark.usefixtures("chunks")
def test_prob_sum_is_the_loss_visits_own():
    inputs = head()
    expected = materialised(*inputs).sf(inputs[4])
    torch.testing.assert_close(ovr_prob_sum(*inputs), expected.sum(1))
    labels = torch.arange(6)
    out = linear_ovr(*inputs, labels, want_prob_sum=True, used_rows=250)
    torch.testing.assert_close(out.prob_sum, expected[:, :250].sum(1))
    torch.testing.assert_close(ovr_prob_sum(*inputs, used_rows=250), out.prob_sum)


@pytest.mark.usefixtures("chunks")
def test_bf16_tokens_lose_nothing_behind_the_product():
    """Logits of 15 against scales of 1e-3, as calibrated: rounded to bf16 they are 1/16 apart, and P is off by half."""
    make = torch.Generator().manual_seed(0)
    weight = torch.randn(500, 896, generator=make) * 0.0156
    loc_u = torch.randn(64, 896, generator=make)
    loc_u = (loc_u * 15 / (loc_u @ weight.T).amax(1, keepdim=True)).bfloat16()
    inputs = [loc_u, torch.full_like(loc_u, 1e-4), weight.bfloat16(), None, torch.tensor(15.0)]
    exact = [t if t is None else t.double() for t in inputs]
    scores, ids = ovr_topk(*inputs, 3)
    expected, expected_ids = ovr_topk(*exact, 3)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(scores, expected, rtol=1e-3, atol=5e-3)
    words = expected_ids[:, 0]
    p = ovr_prob_at(*inputs, words).diagonal()
    torch.testing.assert_close(p.double(), ovr_prob_at(*exact, words).diagonal(), rtol=5e-3, atol=0.0)


def test_bad_input_is_refused():
    inputs = head()
    with pytest.raises(ValueError, match="k must"):
        ovr_topk(*inputs, 0)
    with pytest.raises(ValueError, match="rank_by"):
        ovr_topk(*inputs, 1, rank_by="scale")
    with pytest.raises(ValueError, match="word_ids"):
        ovr_prob_at(*inputs, torch.tensor([300]))
