"""One rank of a world that does not exist, over torch's fake process group: what it allocates, without the others.

Every tensor that a rank allocates is real, on the real device. A collective moves nothing: an all-reduce or broadcast
leaves its tensor as it is, an all-gather repeats this rank's part, a reduce-scatter keeps this rank's part of its own
input. Numbers are therefore meaningless but finite, so no step is refused, and what is allocated depends on no number.
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

LARGEST = 4096  # ranks: each vocabulary group of the world is made here, though only one is used


def _own_part(mine: Tensor, parts: Tensor, *_: Any, group: Any = None, **__: Any) -> None:
    """A reduce-scatter; the fake group of torch 2.11 leaves its output unwritten, where a NaN may lie."""
    mine.copy_(parts.view(dist.get_world_size(group), *mine.shape)[dist.get_rank(group)])


@contextmanager
def one_of(world: int) -> Iterator[Runtime]:
    """Yield rank 0, the one with most rows, of so many ranks. Raises `UserError` under a launcher."""
    if not 2 <= world <= LARGEST:
        raise UserError("--world", world, f"2 to {LARGEST}")
    if dist.is_initialized() or find_ranks(os.environ)[1] > 1:
        raise UserError("--world", world, "one process: the other ranks do not exist")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    device = pick_device(0)
    names = {"RANK": 0, "WORLD_SIZE": world, "LOCAL_RANK": 0, "DS_ACCELERATOR": device.type}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(value) for name, value in names.items()})  # DeepSpeed reads them
    reduce_scatter = dist.reduce_scatter_tensor
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    dist.reduce_scatter_tensor = _own_part  # type: ignore[assignment]
    try:
        yield Runtime(0, world, device)
    finally:
        dist.reduce_scatter_tensor = reduce_scatter
        dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
