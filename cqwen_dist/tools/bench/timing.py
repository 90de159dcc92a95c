"""What the benchmarks share about time: seconds of one piece of work, their spread, the device's name."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from cqwen_dist.config.errors import reason_of

K = TypeVar("K")
T = TypeVar("T")


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of `work`, until the device has finished it."""
    wait_for(device)
    began = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - began


def in_turn(
    contenders: Mapping[K, Callable[[], T]], rounds: int, failed: dict[K, str] | None = None
) -> dict[K, list[T]]:
    """What each contender measures in each round. All are measured in a round before the next one begins.

    failed: where given, a contender that raises is left out, and its error goes there: the others' figures stay.
    """
    found: dict[K, list[T]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in list(found):
            try:
                found[name].append(contenders[name]())
            except Exception as error:
                if failed is None:
                    raise
                failed[name] = said(error)
                del found[name]
    return found


def said(error: Exception) -> str:
    """An error in one line, for a cell of a table."""
    return f"{type(error).__name__}: {reason_of(error, 200)}"


def wait_for(device: torch.device) -> None:
    """Until the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest value."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU with its number of threads."""
    return torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
