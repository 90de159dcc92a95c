"""Simulates one rank in a large world over torch's fake process group, to measure memory.

The rank allocates real tensors on the real device. Collectives transfer no data: an all-reduce or broadcast leaves its
tensor unchanged, an all-gather repeats this rank's part, a reduce-scatter returns this rank's part of the input, and an
all-to-all returns its input.
So values are meaningless but finite. No step is refused, and allocations do not depend on values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cqwen_dist.config import UserError
from cqwen_dist.parallel.runtime import Runtime, find_ranks, pick_device

LARGEST = 4096  # ranks; this process creates every vocabulary group in the world, which takes time


def _own_part(mine: Tensor, parts: Tensor, *_: Any, group: Any = None, **__: Any) -> None:
    """A replacement for reduce-scatter, because torch 2.11's fake group leaves the output uninitialised (maybe NaN)."""
    mine.copy_(parts.view(dist.get_world_size(group), *mine.shape)[dist.get_rank(group)])


def _unchanged(output: Tensor, input: Tensor, *_: Any, **__: Any) -> None:
    """A replacement for an all-to-all, which the fake group leaves uninitialised too."""
    output.copy_(input)


@contextmanager
def one_of(world: int) -> Iterator[Runtime]:
    """Yield the runtime for rank 0, which has the most rows, out of `world` ranks. Raises `UserError` in a launcher."""
    if not 2 <= world <= LARGEST:
        raise UserError("--world", world, f"2 to {LARGEST}")
    if dist.is_initialized() or find_ranks(os.environ)[1] > 1:
        raise UserError("--world", world, "one process: the other ranks do not exist")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    device = pick_device(0)
    names = {"RANK": 0, "WORLD_SIZE": world, "LOCAL_RANK": 0, "DS_ACCELERATOR": device.type}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(value) for name, value in names.items()})  # DeepSpeed reads them
    reduce_scatter, all_to_all = dist.reduce_scatter_tensor, dist.all_to_all_single
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    dist.reduce_scatter_tensor, dist.all_to_all_single = _own_part, _unchanged  # type: ignore[assignment]
    try:
        yield Runtime(0, world, device)
    finally:
        dist.reduce_scatter_tensor, dist.all_to_all_single = reduce_scatter, all_to_all
        dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
