"""The process groups of a run, built once and passed explicitly.

World = vocabulary groups of consecutive ranks (for instance the 8 GPUs of a node). With 4 ranks and groups of 2:

    vocabulary groups {0,1} {2,3}   each holds the whole vocabulary once, a range of rows a rank
    replica groups    {0,2} {1,3}   ranks that hold the same rows and sum their gradients

Every rank has its own tokens (data = world).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout

from cqwen_dist.config import refuse_ranks


@dataclass(frozen=True)
class Groups:
    """World, vocabulary and replica group of this rank."""

    world: ProcessGroup
    vocab: ProcessGroup
    replica: ProcessGroup

    @property
    def world_size(self) -> int:
        return self.world.size()

    @property
    def vocab_rank(self) -> int:
        """Which range of rows this rank holds."""
        return self.vocab.rank()

    @property
    def vocab_size(self) -> int:
        """How many ranks share the vocabulary."""
        return self.vocab.size()


def build_groups(vocab_group_size: int, timeout_s: float | None = None) -> Groups:
    """Build the groups; collective over the world (every rank calls it with the same size).

    timeout_s: of their collectives (torch does not inherit the world's; None: its default).
    Raises `UserError` if the size does not divide the number of ranks.
    """
    world = dist.get_world_size()
    refuse_ranks(vocab_group_size, world)
    starts = range(0, world, vocab_group_size)
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    vocab = _mine("vocabulary", [list(range(start, start + vocab_group_size)) for start in starts], timeout)
    offsets = range(vocab_group_size)
    replica = _mine("replica", [list(range(offset, world, vocab_group_size)) for offset in offsets], timeout)
    everyone = dist.group.WORLD
    assert everyone is not None
    return Groups(everyone, vocab, replica)


def side_group(timeout_s: float | None = None) -> ProcessGroup:
    """A second group of the whole world, over gloo, for the saving thread: a group serves one thread at a time.

    Collective over the world.
    """
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    return dist.new_group(backend="gloo", timeout=timeout, group_desc="saving")


def limit_wait(group: ProcessGroup, seconds: float) -> None:
    """Set the timeout of a group that was made elsewhere (by DeepSpeed)."""
    _set_pg_timeout(timedelta(seconds=seconds), group)


def _mine(name: str, memberships: list[list[int]], timeout: timedelta | None) -> ProcessGroup:
    """Create every group (all ranks must take part) and return this rank's; errors name it."""
    mine = None
    for ranks in memberships:
        group = dist.new_group(ranks, timeout=timeout, group_desc=name)
        if dist.get_rank() in ranks:
            mine = group
    assert mine is not None
    return mine
