"""Measurements of all ranks together: the network between them, and how far their clocks differ."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from cqwen_dist.parallel.collectives import barrier, gather_objects, sum_over

ALL_REDUCES, CLOCK_READINGS = 5, 10


def all_reduce_seconds(sizes: Sequence[int], device: torch.device) -> dict[int, float]:
    """Message size in bytes -> seconds of one all-reduce over the world, the slowest rank's median. Collective."""
    found = {}
    for size in sizes:
        values = torch.zeros(max(1, size // 4), device=device)
        times = []
        for _ in range(ALL_REDUCES + 1):
            barrier()
            began = time.perf_counter()
            sum_over(values)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        found[size] = max(gather_objects(sorted(times[1:])[ALL_REDUCES // 2]))  # the first round connects
    return found


def bus_bandwidth(size: int, seconds: float, world: int) -> float:
    """Bytes a second that each rank's link carries in a ring all-reduce: 2 (n-1)/n of the message."""
    return 2 * (world - 1) / world * size / seconds


def clock_spread() -> float:
    """Seconds by which the ranks' clocks differ at most, read right after a barrier; the least of several rounds.

    An upper bound, as it contains the barrier's own time. Collective.
    """
    best = float("inf")
    for _ in range(CLOCK_READINGS):
        barrier()
        clocks = gather_objects(time.time())
        best = min(best, max(clocks) - min(clocks))
    return best
