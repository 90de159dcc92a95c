"""The collectives of the package: only these functions call `torch.distributed`'s operations.

They have no gradients (see `mappings`). If another rank dies or does not answer within the group's timeout, they raise
`CollectiveError` with the operation, the group and its ranks. (NCCL reports a timeout from its watchdog, which ends the
process and names the group by the same description.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from cqwen_dist.config import UserError

T = TypeVar("T")

# How gloo's and NCCL's failures read; torch raises many of them as plain RuntimeError.
_SIGNS = ("gloo", "NCCL", "Connection closed", "Timed out", "timed out", "Broken pipe", "Connection reset")


class CollectiveError(RuntimeError):
    """A collective failed. No optimizer has stepped since the last completed step."""


class Stopped(BaseException):
    """Some rank was told to stop (`parallel.stop`). It is no failure, and only `train` may catch it."""


def is_communication(error: BaseException) -> bool:
    """Whether an error means that another rank was lost, not that this one failed; DeepSpeed's own errors too."""
    if isinstance(error, (CollectiveError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@contextmanager
def naming(operation: str, group: ProcessGroup | None = None) -> Iterator[None]:
    """Turn a failed communication inside into a `CollectiveError` with its operation and group (default: the world)."""
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        if not is_communication(error):
            raise
        ranks = dist.get_process_group_ranks(group)
        name = "world" if group is None or group == dist.group.WORLD else group.group_desc
        reason = str(error).strip().splitlines()[0]
        raise CollectiveError(
            f"{operation} in the {name} group failed (ranks {ranks}, seen by rank {dist.get_rank()}): a rank died or "
            f"does not answer ({reason})"
        ) from error


def all_gather_into(gathered: Tensor, mine: Tensor, group: ProcessGroup | None = None) -> None:
    """Equal parts [n, ...] of every rank into [size n, ...], rank 0's first."""
    with naming("all-gather", group):
        dist.all_gather_into_tensor(gathered, mine, group=group)


def reduce_scatter_into(mine: Tensor, parts: Tensor, group: ProcessGroup | None = None) -> None:
    """[size n, ...] summed over the ranks; each keeps its own part [n, ...]."""
    with naming("reduce-scatter", group):
        dist.reduce_scatter_tensor(mine, parts, group=group)


def sum_to_owners(parts: Tensor, group: ProcessGroup | None) -> None:
    """[size n, ...] summed over the ranks in place; a rank may read its own part [n, ...] alone.

    A reduce-scatter, which NCCL does in place where the output is that part of the input. On a CPU an all-reduce, as
    gloo's reduce-scatter is one of a copy.
    """
    if parts.device.type == "cpu":
        sum_over(parts, group)
    else:
        reduce_scatter_into(_own_part(parts, group), parts, group)


def gather_from_owners(parts: Tensor, group: ProcessGroup | None) -> None:
    """[size n, ...], of which each rank has its own part [n, ...]: all of them on every rank, in place."""
    all_gather_into(parts, _own_part(parts, group), group)


def _own_part(parts: Tensor, group: ProcessGroup | None) -> Tensor:
    return parts.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def sum_over(values: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum in place over the group (default: the world), and return it."""
    if dist.get_world_size(group) > 1:
        with naming("all-reduce", group):
            dist.all_reduce(values, group=group)
    return values


def gather_rows(values: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Every rank's equally shaped values [...], stacked [size, ...] (default: the world's)."""
    size = dist.get_world_size(group)
    everyone = values.new_empty(size * values.numel())
    all_gather_into(everyone, values.flatten(), group)
    return everyone.view(size, *values.shape)


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's small Python value, by rank of the group (default: the world)."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    with naming("all-gather of objects", group):
        dist.all_gather_object(parts, value, group=group)
    return parts


def barrier() -> None:
    """Wait for every rank of the world."""
    with naming("barrier"):
        dist.barrier()


def main_rank_first(action: Callable[[], T]) -> T | None:
    """Run an action on rank 0 alone, while the others wait. Returns its result on rank 0, None elsewhere.

    Where it fails, all ranks fail, instead of waiting for the timeout: with the same `UserError` or `Stopped`, or the
    others with a RuntimeError that holds rank 0's error.
    """
    result: T | None = None
    failure: BaseException | None = None
    on_the_others: list[BaseException | None] = [None]
    if dist.get_rank() == 0:
        try:
            result = action()
        except BaseException as error:
            failure, same = error, isinstance(error, (UserError, Stopped))
            on_the_others = [error if same else RuntimeError(f"rank 0 failed: {error!r}")]
    try:
        with naming("broadcast of rank 0's outcome"):
            dist.broadcast_object_list(on_the_others)
    except CollectiveError:
        if failure is None:  # else the others have gone for the reason that rank 0 has: all were told to stop
            raise
    if raised := failure or on_the_others[0]:
        raise raised
    return result


def from_main_rank(action: Callable[[], T]) -> T:
    """As `main_rank_first`, but every rank returns rank 0's result, a small Python value."""
    result = [main_rank_first(action)]
    with naming("broadcast of rank 0's result"):
        dist.broadcast_object_list(result)
    return result[0]  # type: ignore[return-value]
