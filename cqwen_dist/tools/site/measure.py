"""Seconds of work on a device; on all ranks together, network speed and clock differences."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cqwen_dist.parallel.collectives import all_gather_into, barrier, gather_objects, reduce_scatter_into, sum_over

ROUNDS, CLOCK_READINGS = 5, 10


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds until the device has finished `work`."""
    wait_for(device)
    began = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - began


def wait_for(device: torch.device) -> None:
    """Blocks until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """The GPU name, or the CPU with the number of threads."""
    return torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def _gather(values: Tensor, world: int) -> None:
    all_gather_into(values, values.chunk(world)[0].clone())


def _scatter(values: Tensor, world: int) -> None:
    reduce_scatter_into(torch.empty_like(values.chunk(world)[0]), values)


# Operation -> (function on a full buffer, number of times a ring carries (n-1)/n of the buffer).
OPERATIONS: dict[str, tuple[Callable[[Tensor, int], object], int]] = {
    "all-reduce": (lambda values, _: sum_over(values), 2),
    "all-gather": (_gather, 1),
    "reduce-scatter": (_scatter, 1),
}


def collective_seconds(
    sizes: Sequence[int], device: torch.device, world: int, operation: str = "all-reduce"
) -> dict[int, float]:
    """{bytes in the full buffer: median seconds on the slowest rank}. Collective."""
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
        found[size] = max(gather_objects(sorted(times[1:])[ROUNDS // 2]))  # the first round opens connections
    return found


def bus_bandwidth(size: int, seconds: float, world: int, operation: str = "all-reduce") -> float:
    """Bytes/s on each rank's link in a ring, which carries (n-1)/n of the buffer, twice in an all-reduce."""
    return OPERATIONS[operation][1] * (world - 1) / world * size / seconds


def said_bandwidths(by_mib: dict[str, float]) -> str:
    """One line of text with the bandwidths of an operation by buffer size in MiB."""
    return "GiB/s a link: " + ", ".join(f"{speed:.2f} of {mib} MiB" for mib, speed in by_mib.items())


def clock_spread() -> float:
    """The largest difference between the ranks' clocks in seconds, read after a barrier; the minimum over rounds.

    It is an upper bound, as it includes the time to leave the barrier. Collective.
    """
    best = float("inf")
    for _ in range(CLOCK_READINGS):
        barrier()
        clocks = gather_objects(time.time())
        best = min(best, max(clocks) - min(clocks))
    return best
