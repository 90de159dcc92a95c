"""Counts collectives in a process, with bytes and times, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

# Function names in torch.distributed.
COLLECTIVES = (
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"),
    *("broadcast", "all_gather_object"),
)


class Transfer(NamedTuple):
    """One collective: torch's name, the group's description (`world`: all ranks), ranks, bytes in the full buffer."""

    operation: str
    group: str
    ranks: int
    bytes: int


class Traffic:
    """Counts collectives while `on`, with a timestamp before and after each. It never synchronises."""

    def __init__(self, now: Callable[[], Any]) -> None:
        """now: returns a timestamp of any type, for example a CUDA event."""
        self.now = now
        self.on = False
        self._messages: list[Transfer] = []
        self._times: list[tuple[Any, Any]] = []

    def take(self) -> tuple[list[Transfer], list[tuple[Any, Any]]]:
        """Returns and clears (collectives, timestamps before and after each)."""
        found = self._messages, self._times
        self._messages, self._times = [], []
        return found

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wraps torch's collectives. Enter it before DeepSpeed starts, which keeps the functions it finds first."""
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
            # The full buffer is the largest tensor: the output in an all-gather, the input in a reduce-scatter.
            size = max((x.nbytes for x in (*args, *options.values()) if isinstance(x, Tensor)), default=0)
            self._messages.append(Transfer(name, label, dist.get_world_size(group), size))
            before = self.now()
            result = original(*args, **options)
            self._times.append((before, self.now()))
            return result

        return call
