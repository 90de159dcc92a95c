"""What sharding adds to a rank's share of the loss, on this machine: printed, and held to a bound when run.

Two ranks pinned to a core each. Sharded: each brings N tokens and holds V/2 rows, so it works on 2N x V/2. Unsharded:
both at the same time, N x V each, no word between them. The same products (12 N V C flops a rank), in the same run,
in turn, round by round. Beside them the six matrix products alone ("GEMM").
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from benchmarks.loss import Problem, contenders
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import WordHead, linear_ovr
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.parallel.vocab_parallel import vocab_parallel_loss, vocab_range

N, C, V, ROUNDS = 256, 896, 37_984, 9


def timings() -> dict[str, list[float]]:
    """Seconds of each contender, by round, on this rank; the slower rank's, as both wait for it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    group = build_groups(world).vocab
    g = torch.Generator().manual_seed(rank)
    loc, scale = torch.randn(N, C, generator=g), torch.full((N, C), 1e-3)
    weight, threshold = torch.randn(V, C, generator=g) * 0.0156, torch.full((V,), 15.0)
    labels = torch.randint(V, (N,), generator=g)
    whole = Problem(*(t.requires_grad_() for t in (loc, scale, weight, threshold)), labels)
    start, stop = vocab_range(V, rank, world)
    rows, thresholds = (t.detach()[start:stop].clone().requires_grad_() for t in (weight, threshold))

    def sharded() -> None:
        u, head = Cauchy(loc, scale), WordHead(rows, None, thresholds, start)
        out = vocab_parallel_loss(u, head, labels, group=group, token_counts=[N] * world)
        out.loss.backward()

    def unsharded() -> None:
        linear_ovr(loc, scale, weight, None, threshold, labels, want_prob_sum=True).loss.backward()

    steps: dict[str, Callable[[], object]] = {
        "sharded": sharded,
        "unsharded": unsharded,
        "GEMM": contenders("auto")["floor"](whole),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS + 1):
        for name, step in steps.items():
            for leaf in (*whole[:4], rows, thresholds):
                leaf.grad = None
            dist.barrier()
            began = time.perf_counter()
            step()
            taken = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if turn:  # the first warms up
                seconds[name].append(float(taken))
    return seconds


@pytest.mark.slow
def test_sharding_adds_little_time() -> None:
    seconds = run_ranks(timings, 2)[0]
    best = {name: min(times) for name, times in seconds.items()}
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    for kind, found in (("best", best), ("median", middle)):
        added = (found["sharded"] - found["unsharded"]) / found["GEMM"]
        listed = ", ".join(f"{name} {value:.3f} s" for name, value in found.items())
        print(f"N={N} C={C} V={V} {ROUNDS} rounds, {kind}: {listed}; sharding adds {added:+.1%} of the GEMMs' time")
    assert (best["sharded"] - best["unsharded"]) / best["GEMM"] <= 0.15
