"""The collectives of the package, and classes of failures. Only these functions call `torch.distributed`.

They have no gradients (see `mappings`). If a rank dies or does not answer within the group's timeout, they raise
`CollectiveError`, which names the operation, the group and the ranks. (NCCL's watchdog reports a timeout itself: it
ends the process and names the group by the same description.)
"""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from cqwen_dist.config.errors import DiskError, Said, UserError, reason_of

T = TypeVar("T")
Facts = dict[str, str]
UNSEEN = "not read"  # placeholder for a fact that a different rank of this host reads
_SHOWN = 40  # most characters of a value in a refusal

# Text in gloo's and NCCL's error messages; torch raises many of these errors as plain RuntimeError.
_SIGNS = ("gloo", "NCCL", "Connection closed", "Timed out", "timed out", "Broken pipe", "Connection reset")


class CollectiveError(RuntimeError):
    """A collective failed. No optimizer has stepped since the last completed step."""


class Stopped(BaseException):
    """A rank received a stop request (`parallel.stop`). This is not a failure; only `train` may catch it."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason or "a different rank got a signal to stop")


def is_communication(error: BaseException) -> bool:
    """Whether an error means that a different rank was lost. Recognises DeepSpeed's errors too."""
    if isinstance(error, (CollectiveError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@contextmanager
def naming(operation: str, group: ProcessGroup | None = None) -> Iterator[None]:
    """Turn a communication failure inside into a `CollectiveError` that names operation and group (default: world)."""
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
    """Gather equal parts [n, ...] of all ranks into [size n, ...], in rank order."""
    with naming("all-gather", group):
        dist.all_gather_into_tensor(gathered, mine, group=group)


def reduce_scatter_into(mine: Tensor, parts: Tensor, group: ProcessGroup | None = None) -> None:
    """Sum [size n, ...] over the ranks; each rank keeps its part [n, ...]."""
    with naming("reduce-scatter", group):
        dist.reduce_scatter_tensor(mine, parts, group=group)


def sum_to_owners(parts: Tensor, group: ProcessGroup | None) -> None:
    """Sum [size n, ...] over the ranks in place. Afterwards only this rank's part [n, ...] is valid.

    NCCL's reduce-scatter runs in place if the output is a part of the input. gloo's would copy the input, so on a CPU
    this is an all-reduce.
    """
    if parts.device.type == "cpu":
        sum_over(parts, group)
    else:
        reduce_scatter_into(_own_part(parts, group), parts, group)


def gather_from_owners(parts: Tensor, group: ProcessGroup | None) -> None:
    """All-gather in place: each rank fills its part [n, ...] of [size n, ...] before the call."""
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
    """Gather equally shaped values [...] of all ranks as [size, ...] (default group: the world)."""
    size = dist.get_world_size(group)
    everyone = values.new_empty(size * values.numel())
    all_gather_into(everyone, values.flatten(), group)
    return everyone.view(size, *values.shape)


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Gather a small Python value of each rank, in rank order (default group: the world)."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    with naming("all-gather of objects", group):
        dist.all_gather_object(parts, value, group=group)
    return parts


def barrier() -> None:
    """Wait for every rank of the world."""
    with naming("barrier"):
        dist.barrier()


def main_rank_first(action: Callable[[], T]) -> T | None:
    """Run an action on rank 0 while all other ranks wait. Returns its result on rank 0 and None on the other ranks.

    If the action fails, all ranks raise at once instead of waiting for the timeout. A `UserError`, `Stopped` or OSError
    is raised on all ranks. After any other error, the other ranks raise a RuntimeError that quotes it.
    """
    result: T | None = None
    failure: BaseException | None = None
    on_the_others: list[BaseException | None] = [None]
    # No early return here: every rank must reach the broadcast, whatever happens to rank 0
    if dist.get_rank() == 0:
        try:
            result = action()
        except BaseException as error:  # kept until the broadcast below, for which the other ranks wait
            # A library's own kind of OSError may be one that cannot be sent
            plain = isinstance(error, OSError) and type(error).__module__ == "builtins"
            failure, same = error, plain or isinstance(error, (UserError, Stopped))
            on_the_others = [error if same else RuntimeError(f"rank 0 failed: {error!r}")]
    try:
        with naming("broadcast of rank 0's outcome"):
            dist.broadcast_object_list(on_the_others)
    except CollectiveError:
        if failure is None:  # otherwise rank 0's error is the cause, and the other ranks stopped for the same reason
            raise
    if raised := failure or on_the_others[0]:
        raise raised
    return result


def from_main_rank(action: Callable[[], T]) -> T:
    """Like `main_rank_first`, but all ranks return the result of rank 0, a small Python value."""
    result = [main_rank_first(action)]
    with naming("broadcast of rank 0's result"):
        dist.broadcast_object_list(result)
    return result[0]  # type: ignore[return-value]


def agree(read: Callable[[], tuple[T, Facts]]) -> tuple[T, Facts]:
    """Refuse ranks whose facts differ from rank 0's. Collective over the world.

    read: returns a value, which stays on this rank, and its facts: config key, or a name that the user knows, to
    text. Returns this rank's value and rank 0's facts. Raises `UserError` on all ranks, with the key, the rank and its
    host. If `read` raises on one rank, all raise, so that no rank waits for one that has left: an OSError becomes a
    `UserError`, and for errors of other kinds the other ranks raise a RuntimeError that quotes it.
    """
    mine: Facts | UserError | str
    failure: Exception | None = None
    try:
        value, mine = read()
    except (UserError, OSError) as error:
        unread = UserError("inputs", Said(reason_of(error)), "files that every rank can read")
        mine = error if isinstance(error, UserError) else unread
    except Exception as error:
        failure, mine = error, f"{type(error).__name__}: {reason_of(error)}"
    everyone = gather_objects((platform.node(), mine))
    for rank, (host, found) in enumerate(everyone):
        at = f"rank {rank} on {host}" if rank else ""
        if isinstance(found, UserError):
            raise UserError(found.key, found.found, found.allowed, ": ".join(filter(None, (at, found.where))))
        if isinstance(found, str):
            raise failure or RuntimeError(f"{at or 'rank 0'} failed: {found}")
    _refuse_differences(everyone)
    return value, everyone[0][1]


def _refuse_differences(everyone: list[tuple[str, Facts]]) -> None:
    """everyone: host and facts by rank. Raises `UserError` as `agree`."""
    host, first = everyone[0]
    for rank, (other_host, found) in enumerate(everyone):
        both = {key: (first.get(key, "absent"), found.get(key, "absent")) for key in {**first, **found}}
        keys = [key for key, values in both.items() if UNSEEN not in values and values[0] != values[1]]
        if keys:
            here, there = (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..." for text in both[keys[0]])
            more = f"; {len(keys) - 1} more keys differ" if keys[1:] else ""
            found_there = f"{there} on rank {rank} ({other_host}), {here} on rank 0 ({host}){more}"
            raise UserError(keys[0], Said(found_there), "the same on every rank")


def first_of_host() -> bool:
    """True on the first rank of each host, which reads large files. Collective over the world."""
    return gather_objects(platform.node()).index(platform.node()) == dist.get_rank()


LOST_RANK = "a lost rank"


class Cause(NamedTuple):
    """A class of failures. passing: a retry may succeed, perhaps on different nodes; otherwise a fix is needed."""

    name: str
    passing: bool


class KnownFailure(RuntimeError):
    """A failure that knows its own class."""

    cause = Cause("the program", passing=False)


def cause_of(error: BaseException) -> Cause:
    """The class of a failure."""
    if isinstance(error, KnownFailure):
        return error.cause
    if isinstance(error, DiskError):
        return Cause("a file system that is away", True) if error.away else Cause("a disk that takes no more", False)
    if isinstance(error, UserError):
        return Cause("input", False)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Cause("memory", False)
    if is_communication(error):
        return Cause(LOST_RANK, True)
    text = str(error)
    signs = ("CUDA error", "ECC", "NVLink", "device is lost")
    if isinstance(error, RuntimeError) and any(sign in text for sign in signs) and "device-side assert" not in text:
        return Cause("a device", True)
    return Cause("the program", False)
