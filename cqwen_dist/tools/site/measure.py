"""Network speed, measured by all ranks together."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from cqwen_dist.parallel.collectives import barrier, gather_objects, sum_over

ROUNDS = 5


def all_reduce_seconds(sizes: Sequence[int], device: torch.device, world: int) -> dict[int, float]:
    """{bytes of the buffer: median seconds of an all-reduce on the slowest rank}. Collective."""
    found = {}
    for size in sizes:
        values = torch.zeros(world * max(1, size // (4 * world)), device=device)
        times = []
        for _ in range(ROUNDS + 1):
            barrier()
            began = time.perf_counter()
            sum_over(values)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        found[size] = max(gather_objects(sorted(times[1:])[ROUNDS // 2]))  # the first round opens connections
    return found


def bus_bandwidth(size: int, seconds: float, world: int) -> float:
    """Bytes/s on each rank's link in a ring, which an all-reduce has carry (n-1)/n of the buffer twice."""
    return 2 * (world - 1) / world * size / seconds
