"""Label scores, normaliser and label sets against the materialised [N, V] in float64; in slices and over ranks."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import WordHead
from cqwen_dist.ops.ovr.scores import OvrScores, ovr_scores
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
    p = 0.5 + torch.atan((loc_s - threshold.double()) / scale_s) / math.pi
    at = labels[:, None]
    above = torch.stack([(p[:, :USED] > x).sum(1) for x in P], 1)
    return OvrScores(loc_s.logsumexp(1), loc_s.gather(1, at)[:, 0], p.gather(1, at)[:, 0].log(), above)


def assert_close(found: OvrScores, expected: OvrScores) -> None:
    for name, a, b in zip(found._fields, found, expected, strict=True):
        torch.testing.assert_close(
            a.double(), b.double(), rtol=3e-5, atol=3e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("scalar", [True, False])
def test_scores_equal_their_definitions(scalar: bool) -> None:
    inputs = problem(scalar=scalar)
    u, head = Cauchy(*inputs[:2]), WordHead(*inputs[2:5], used_rows=USED)
    assert_close(ovr_scores(u, head, inputs[5], prob_thresholds=P), oracle(*inputs))


def test_slices_and_chunks_give_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem()
    monkeypatch.setattr("cqwen_dist.ops.ovr.scores.chunk_rows", lambda n, c: 7)
    parts = []
    for start, stop in ((0, 50), (50, 50), (50, V)):
        loc, scale, weight, bias, threshold, labels = inputs
        rows = slice(start, stop)
        head = WordHead(weight[rows], bias[rows], threshold[rows], start, used_rows=USED)
        parts.append(ovr_scores(Cauchy(loc, scale), head, labels, prob_thresholds=P))
    norm = torch.stack([part.log_norm for part in parts]).logsumexp(0)
    assert_close(OvrScores(norm, *(sum(column) for column in list(zip(*parts, strict=True))[1:])), oracle(*inputs))


def on_rank(counts: list[int]) -> list[np.ndarray]:
    """As numpy: a tensor sent to the parent is lost where its process ends first."""
    loc, scale, weight, bias, threshold, labels = problem(sum(counts))
    rank, world = dist.get_rank(), dist.get_world_size()
    start, stop = vocab_range(V, rank, world)
    mine, rows = slice(sum(counts[:rank]), sum(counts[: rank + 1])), slice(start, stop)
    u = Cauchy(loc[mine], scale[mine])
    head = WordHead(weight[rows], bias[rows], threshold[rows], start, used_rows=USED)
    found = vocab_parallel_scores(u, head, labels[mine], dist.group.WORLD, prob_thresholds=P)
    return [part.numpy() for part in found]


@pytest.mark.parametrize("counts", [[9, 14], [11, 0, 6]])
def test_ranks_score_their_own_tokens_over_the_whole_vocabulary(counts: list[int]) -> None:
    expected = oracle(*problem(sum(counts)))
    found = run_ranks(on_rank, len(counts), counts)
    assert [len(log_norm) for log_norm, *_ in found] == counts
    columns = (torch.from_numpy(np.concatenate(column)) for column in zip(*found, strict=True))
    assert_close(OvrScores(*columns), expected)
