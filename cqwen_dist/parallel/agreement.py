"""Ranks agree before they go on: a rank that found something else is refused by name, on all ranks."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from cqwen_dist.config.errors import Said, UserError, reason_of
from cqwen_dist.parallel.collectives import gather_objects

UNSEEN = "not read"  # the value of a fact that this rank leaves to another rank of its host
_SHOWN = 40  # most characters of a value in a refusal
Facts = dict[str, str]
T = TypeVar("T")


def agree(read: Callable[[], tuple[T, Facts]]) -> tuple[T, Facts]:
    """Refuse ranks whose facts differ from rank 0's. Collective over the world.

    read: returns a value, which stays on this rank, and its facts: config key, or another name that the user knows, to
    text. Returns this rank's value and rank 0's facts. Raises `UserError` on all ranks, with the key, the rank and its
    host. An error of `read` on one rank is raised on all, so that no rank waits for one that has left.
    """
    mine: Facts | Exception
    try:
        value, mine = read()
    except (UserError, OSError) as error:
        mine = error
    everyone = gather_objects((platform.node(), mine))
    for rank, (host, found) in enumerate(everyone):
        at = f"rank {rank} on {host}" if rank else ""
        if isinstance(found, UserError):
            raise UserError(found.key, found.found, found.allowed, ": ".join(filter(None, (at, found.where))))
        if isinstance(found, OSError):
            raise UserError("inputs", Said(reason_of(found)), "files that every rank can read", at)
    host, first = everyone[0]
    for rank, (other_host, found) in enumerate(everyone):
        both = {key: (first.get(key, "absent"), found.get(key, "absent")) for key in {**first, **found}}
        keys = [key for key, values in both.items() if UNSEEN not in values and values[0] != values[1]]
        if keys:
            here, there = (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..." for text in both[keys[0]])
            more = f"; {len(keys) - 1} more keys differ" if keys[1:] else ""
            found_there = f"{there} on rank {rank} ({other_host}), {here} on rank 0 ({host}){more}"
            raise UserError(keys[0], Said(found_there), "the same on every rank")
    return value, first


def first_of_host() -> bool:
    """Whether this rank is the first on its host, and so the one that reads large files. Collective over the world."""
    hosts = gather_objects(platform.node())
    return hosts.index(platform.node()) == dist.get_rank()
