"""What the ranks measure together before they train: the network between them, and whether their clocks agree."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from cqwen_dist.parallel.collectives import barrier, gather_objects, sum_over


def all_reduce_seconds(sizes: Sequence[int], device: torch.device, rounds: int = 5) -> dict[int, float]:
    """Seconds of one all-reduce over the world by message size in bytes: the median round of the slowest rank.

    Collective. On one rank: nothing to measure.
    """
    if dist.get_world_size() == 1:
        return {}
    found = {}
    for size in sizes:
        values = torch.zeros(max(1, size // 4), device=device)
        times = []
        for _ in range(rounds + 1):
            barrier()
            began = time.perf_counter()
            sum_over(values)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        found[size] = max(gather_objects(sorted(times[1:])[rounds // 2]))  # the first one connects
    return found


def bus_bandwidth(size: int, seconds: float, world: int) -> float:
    """Bytes a second that each rank's link carries in a ring all-reduce: 2 (n-1)/n of the message."""
    return 2 * (world - 1) / world * size / seconds


def clock_spread(rounds: int = 10) -> float:
    """Seconds by which the ranks' clocks differ at most, read right after a barrier; the best of several rounds.

    Collective. An upper bound: what the barrier itself takes is in it.
    """
    best = float("inf")
    for _ in range(rounds):
        barrier()
        clocks = gather_objects(time.time())
        best = min(best, max(clocks) - min(clocks))
    return best


def device_name() -> tuple[str, str]:
    """(torch's CUDA version, NCCL's), or empty without them."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
    return torch.version.cuda or "", nccl
