"""Counts the collectives of a process, in bytes and time, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

# Collectives as torch names them.
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast", "all_gather_object")


class Transfer(NamedTuple):
    """One collective: torch's name, its group's description (`world`: all ranks), ranks, bytes of the whole buffer."""

    operation: str
    group: str
    ranks: int
    bytes: int


class Traffic:
    """Counts while `on`. It takes a timestamp before and after each collective, and waits for nothing."""

    def __init__(self, now: Callable[[], Any]) -> None:
        """now: a timestamp in the caller's own unit, such as a CUDA event."""
        self.now = now
        self.on = False
        self._messages: list[Transfer] = []
        self._times: list[tuple[Any, Any]] = []

    def take(self) -> tuple[list[Transfer], list[tuple[Any, Any]]]:
        """(collectives since the last call, timestamps before and after each)."""
        found = self._messages, self._times
        self._messages, self._times = [], []
        return found

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, torch's collectives are wrapped. Enter it before DeepSpeed starts, which keeps the first it finds."""
        originals = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, original in originals.items():
            setattr(dist, name, self._watched(name, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not self.on:
                return original(*args, **options)
            group = options.get("group")
            label = "world" if group is None or group == dist.group.WORLD else group.group_desc
            size = max((x.nbytes for x in (*args, *options.values()) if isinstance(x, Tensor)), default=0)
            self._messages.append(Transfer(name, label, dist.get_world_size(group), size))
            before = self.now()
            result = original(*args, **options)
            self._times.append((before, self.now()))
            return result

        return call
