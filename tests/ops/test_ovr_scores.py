"""Label scores, normaliser and label sets against the materialised [N, V] in float64; in slices and over ranks."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.devices import DEVICES
from support.numerics import assert_best, ovr_prob_at, ovr_top_word
from support.ranks import run_ranks

from cqwen_dist import tiles
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import WordHead, linear_ovr
from cqwen_dist.ops.ovr.scores import OvrScores, ovr_scores, prob_sums
from cqwen_dist.ops.ovr.seen import TopWord
from cqwen_dist.parallel.vocab_parallel import vocab_parallel_scores, vocab_range

N, C, V, USED = 37, 12, 123, 117
P = (0.05, 0.5, 0.7)


def problem(tokens: int = N, scalar: bool = False) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    loc, scale = torch.randn(tokens, C, generator=g), torch.rand(tokens, C, generator=g) * 0.1 + 1e-3
    weight, bias = torch.randn(V, C, generator=g), torch.randn(V, generator=g)
    threshold = torch.tensor(2.0) if scalar else torch.randn(V, generator=g) + 2.0
    return loc, scale, weight, bias, threshold, torch.randint(0, V, (tokens,), generator=g)


def oracle(loc, scale, weight, bias, threshold, labels) -> OvrScores:
    loc_s = loc.double() @ weight.double().T + bias.double()
    scale_s = scale.double() @ weight.double().abs().T
    z = (loc_s - threshold.double()) / scale_s
    p = 0.5 + torch.atan(z) / math.pi
    at = labels[:, None]
    above = torch.stack([(p[:, :USED] > x).sum(1) for x in P], 1)
    label_p = p.gather(1, at)[:, 0]
    loss = -(1 - p).log().sum(1) + (1 - label_p).log() - label_p.log()
    score, word = z[:, :USED].max(1)
    best = TopWord(score, loc_s.gather(1, word[:, None])[:, 0], word)
    label = loc_s.gather(1, at)[:, 0], label_p.log()
    return OvrScores(loc_s.logsumexp(1), *label, above, loss, p.sum(1), best)


def assert_close(found: OvrScores, expected: OvrScores) -> None:
    names = *OvrScores._fields[:-1], *TopWord._fields
    for name, a, b in zip(names, [*found[:-1], *found.best], [*expected[:-1], *expected.best], strict=True):
        torch.testing.assert_close(
            a.double().cpu(), b.double().cpu(), rtol=3e-5, atol=3e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@DEVICES
@pytest.mark.parametrize("scalar", [True, False])
def test_scores_equal_their_definitions(scalar: bool, device: str) -> None:
    inputs = [part.to(device) for part in problem(scalar=scalar)]
    u, head = Cauchy(*inputs[:2]), WordHead(*inputs[2:5], used_rows=USED)
    assert_close(ovr_scores(u, head, inputs[5], prob_thresholds=P), oracle(*inputs))


@DEVICES
def test_bf16_scores_are_as_those_of_float64(device: str) -> None:
    """The best word is decided in fp32, whatever the products were rounded to."""
    g = torch.Generator().manual_seed(1)
    weight, labels = torch.randn(700, 64, generator=g) * 0.1, torch.randint(700, (200,), generator=g)
    own = weight[labels]
    loc = torch.randn(200, 64, generator=g) + own / own.square().sum(1, keepdim=True) * 12
    u = Cauchy(loc.to(device), (torch.rand(200, 64, generator=g) * 1e-3 + 1e-4).to(device)).to(torch.bfloat16)
    weight, threshold, labels = weight.bfloat16().to(device), torch.tensor(11.3, device=device), labels.to(device)
    wide = Cauchy(u.loc.double(), u.scale.double()), WordHead.of(weight.double(), None, threshold.double())
    exact, found = ovr_scores(*wide, labels), ovr_scores(u, WordHead.of(weight, None, threshold), labels)
    z = (wide[0].loc @ wide[1].weight.T - 11.3) / (wide[0].scale @ wide[1].weight.abs().T)
    assert_best(found.best.word, z)
    for name in ("log_norm", "label_loc", "label_log_p", "per_token", "prob_sum"):
        a, b = (getattr(scores, name).double() for scores in (found, exact))
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(a.mean(), b.mean(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_sums_of_p_for_one_common_scale(dtype: torch.dtype, tolerance: float) -> None:
    loc, scale, weight, bias, threshold, labels = problem()
    loc, scale, weight = (part.to(dtype) for part in (loc, scale[0], weight))
    head = WordHead(weight, bias, threshold, used_rows=USED)
    inputs = (part.double() for part in (loc, scale.expand_as(loc), weight, bias, threshold))
    expected = linear_ovr(*inputs, labels.clamp(max=USED - 1), impl="reference", want_prob_sum=True, used_rows=USED)
    torch.testing.assert_close(prob_sums(loc, scale, head).double(), expected.prob_sum, rtol=tolerance, atol=tolerance)


def test_slices_and_chunks_give_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem()
    monkeypatch.setitem(tiles.TILE_BYTES, "cpu", 4 * N * 7)
    monkeypatch.setitem(tiles.CHUNK_BYTES, "cpu", 4 * 7 * 5)
    parts = []
    for start, stop in ((0, 50), (50, 50), (50, V)):
        loc, scale, weight, bias, threshold, labels = inputs
        rows = slice(start, stop)
        head = WordHead(weight[rows], bias[rows], threshold[rows], start, used_rows=USED)
        parts.append(ovr_scores(Cauchy(loc, scale), head, labels, prob_thresholds=P))
    norm = torch.stack([part.log_norm for part in parts]).logsumexp(0)
    summed = (sum(column) for column in list(zip(*parts, strict=True))[1:-1])
    words = torch.stack([part.best.word for part in parts]).gather(
        0, torch.stack([part.best.score for part in parts]).argmax(0)[None]
    )
    expected = oracle(*inputs)
    assert torch.equal(words[0], expected.best.word)
    assert_close(OvrScores(norm, *summed, expected.best), expected)


def on_rank(counts: list[int]) -> list[np.ndarray]:
    """As numpy: a tensor sent to the parent is lost where its process ends first."""
    loc, scale, weight, bias, threshold, labels = problem(sum(counts))
    rank, world = dist.get_rank(), dist.get_world_size()
    start, stop = vocab_range(V, rank, world)
    mine, rows = slice(sum(counts[:rank]), sum(counts[: rank + 1])), slice(start, stop)
    u = Cauchy(loc[mine], scale[mine])
    head = WordHead(weight[rows], bias[rows], threshold[rows], start, used_rows=USED)
    found = vocab_parallel_scores(u, head, labels[mine], dist.group.WORLD, prob_thresholds=P)
    return [part.numpy() for part in (*found[:-1], *found.best)]


def test_ranks_score_their_own_tokens_over_the_whole_vocabulary() -> None:
    counts = [11, 0, 6]
    expected = oracle(*problem(sum(counts)))
    found = run_ranks(on_rank, len(counts), counts)
    assert [len(log_norm) for log_norm, *_ in found] == counts
    columns = (torch.from_numpy(np.concatenate(column)) for column in zip(*found, strict=True))
    *parts, score, loc, word = columns
    assert_close(OvrScores(*parts, TopWord(score, loc, word)), expected)


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
