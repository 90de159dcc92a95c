"""The few plain collectives the rest of the package needs, each with one name. No gradients: see `mappings`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from cqwen_dist.config import UserError

T = TypeVar("T")


def sum_over(values: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum in place over the group (default: the world), and return it."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, group=group)
    return values


def gather_rows(values: Tensor) -> Tensor:
    """Every rank's equally shaped values [n], stacked [world, n]."""
    world = dist.get_world_size()
    everyone = values.new_empty(world * values.numel())
    dist.all_gather_into_tensor(everyone, values)
    return everyone.view(world, -1)


def gather_objects(value: Any) -> list[Any]:
    """Every rank's small Python value, by rank."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts


def gather_lists(values: Tensor) -> Tensor:
    """All ranks' 1-D values [n_r] one after the other, on the CPU (evaluation: a median needs them all)."""
    return torch.cat([torch.from_numpy(part) for part in gather_objects(values.detach().cpu().numpy())])


def barrier() -> None:
    """Wait for every rank of the world."""
    dist.barrier()


def main_rank_first(action: Callable[[], T]) -> T | None:
    """Run an action on rank 0 alone; the others wait, and fail with it where it fails.

    Returns its result on rank 0, None elsewhere. A `UserError` is raised alike on every rank; without the exchange
    the others would wait for the timeout.
    """
    result: T | None = None
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            result = action()
        except UserError as error:
            outcome = [(error.key, error.found, error.allowed, error.where)]
        except BaseException as error:
            outcome = [repr(error)]
            dist.broadcast_object_list(outcome)
            raise
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], tuple):
        raise UserError(*outcome[0])
    if outcome[0] is not None:
        raise RuntimeError(f"rank 0 failed: {outcome[0]}")
    return result
