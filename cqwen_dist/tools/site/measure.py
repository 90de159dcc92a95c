"""Measurements of all ranks together: the network between them, and how far their clocks differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cqwen_dist.parallel.collectives import all_gather_into, barrier, gather_objects, reduce_scatter_into, sum_over

ROUNDS, CLOCK_READINGS = 5, 10


def _gather(values: Tensor, world: int) -> None:
    all_gather_into(values, values.chunk(world)[0].clone())


def _scatter(values: Tensor, world: int) -> None:
    reduce_scatter_into(torch.empty_like(values.chunk(world)[0]), values)


# Operation -> (over a whole buffer on the world's ranks, how often a ring carries (n-1)/n of the buffer).
OPERATIONS: dict[str, tuple[Callable[[Tensor, int], object], int]] = {
    "all-reduce": (lambda values, _: sum_over(values), 2),
    "all-gather": (_gather, 1),
    "reduce-scatter": (_scatter, 1),
}


def collective_seconds(
    sizes: Sequence[int], device: torch.device, world: int, operation: str = "all-reduce"
) -> dict[int, float]:
    """Bytes of the whole buffer -> seconds over the world's ranks, the slowest rank's median. Collective."""
    found, run = {}, OPERATIONS[operation][0]
    for size in sizes:
        values = torch.zeros(world * max(1, size // (4 * world)), device=device)
        times = []
        for _ in range(ROUNDS + 1):
            barrier()
            began = time.perf_counter()
            run(values, world)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        found[size] = max(gather_objects(sorted(times[1:])[ROUNDS // 2]))  # the first round connects
    return found


def bus_bandwidth(size: int, seconds: float, world: int, operation: str = "all-reduce") -> float:
    """Bytes a second that each rank's link carries in a ring: (n-1)/n of the buffer, twice in an all-reduce."""
    return OPERATIONS[operation][1] * (world - 1) / world * size / seconds


def said_bandwidths(by_mib: dict[str, float]) -> str:
    """Bandwidths of an operation, by MiB of the buffer, in one line."""
    return "GiB/s a link: " + ", ".join(f"{speed:.2f} of {mib} MiB" for mib, speed in by_mib.items())


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
