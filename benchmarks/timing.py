"""Seconds of work on a device, rounds of measurements, and their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from cqwen_dist.config.errors import reason_of

K = TypeVar("K")
T = TypeVar("T")


def in_turn(
    contenders: Mapping[K, Callable[[], T]], rounds: int, failed: dict[K, str] | None = None
) -> dict[K, list[T]]:
    """Runs every contender once per round and returns the measurements by contender.

    failed: if given, a contender that raises is dropped and the error is stored here; the other contenders continue.
    """
    found: dict[K, list[T]] = {name: [] for name in contenders}
    # Rounds are the outer loop, so a slow change of the machine (heat, other load) hits all contenders alike.
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
    """An error on one line, for a table cell."""
    return f"{type(error).__name__}: {reason_of(error, 200)}"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


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
