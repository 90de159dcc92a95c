"""Ranks compare facts before they continue: a rank that differs is named in an error on all ranks."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from cqwen_dist.config.errors import Said, UserError, reason_of
from cqwen_dist.parallel.collectives import gather_objects

UNSEEN = "not read"  # placeholder for a fact that a different rank of this host reads
_SHOWN = 40  # most characters of a value in a refusal
Facts = dict[str, str]
T = TypeVar("T")


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
