"""The process groups of a run, built once and passed explicitly.

A vocabulary group has consecutive ranks (for instance the 8 GPUs of a node). With 4 ranks and groups of 2:

    vocabulary groups {0,1} {2,3}   each group stores the vocabulary once, each rank a range of rows
    replica groups    {0,2} {1,3}   ranks that store the same rows and sum their gradients
    sequence groups   {0,1} {2,3}   ranks with the same texts, each with a slice of the positions

Sequence groups are consecutive ranks too, of any size that divides the world. Each rank has different tokens, with or
without sequence groups: the data-parallel group is the world.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout

from cqwen_dist.config.errors import refuse_ranks
from cqwen_dist.parallel.collectives import from_main_rank

T = TypeVar("T")


@dataclass(frozen=True)
class Groups:
    """The groups of this rank. In `ALONE`, for a single process, all are None.

    The functions of `parallel.mappings` treat None as a group of one.
    """

    world: ProcessGroup | None
    vocab: ProcessGroup | None
    replica: ProcessGroup | None
    sequence: ProcessGroup | None = None  # None: every rank has whole texts
    saving: ProcessGroup | None = None  # all ranks, gloo but in a planned world (fake); threads must not share a group

    @property
    def world_size(self) -> int:
        return 1 if self.world is None else self.world.size()

    @property
    def rank(self) -> int:
        """Index of this rank in the world."""
        return 0 if self.world is None else self.world.rank()

    @property
    def vocab_rank(self) -> int:
        """Index of this rank's range of rows."""
        return 0 if self.vocab is None else self.vocab.rank()

    @property
    def vocab_size(self) -> int:
        """Number of ranks that share the vocabulary."""
        return 1 if self.vocab is None else self.vocab.size()

    @property
    def replica_rank(self) -> int:
        """Index of this rank among the ranks with the same rows."""
        return 0 if self.replica is None else self.replica.rank()

    @property
    def sequence_rank(self) -> int:
        """Index of this rank's slice of the positions."""
        return 0 if self.sequence is None else self.sequence.rank()

    @property
    def sequence_size(self) -> int:
        """Number of ranks in this rank's sequence group."""
        return 1 if self.sequence is None else self.sequence.size()

    @property
    def reading(self) -> dict[str, int]:
        """Loader arguments. Sequence groups read different samples; each rank gets a slice of every sample."""
        size = self.sequence_size
        shared = {"rank": self.rank // size, "world": self.world_size // size}
        return {**shared, "part": self.sequence_rank, "parts": size}

    def agreed(self, action: Callable[[], T]) -> T:
        """Run the action on rank 0 and return its small Python value on all ranks. Collective over the world."""
        return action() if self.world is None else from_main_rank(action)


ALONE = Groups(None, None, None)


def build_groups(vocab_group_size: int, timeout_s: float | None = None, sequence_group_size: int = 1) -> Groups:
    """Build the groups; collective over the world (every rank calls it with the same sizes).

    timeout_s: of the new groups, which do not inherit the world's (None: torch's default). Raises `UserError` if a size
    does not divide the number of ranks.
    """
    world = dist.get_world_size()
    refuse_ranks(world, vocab_group_size, sequence_group_size)
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    ranks = torch.arange(world).view(-1, vocab_group_size)  # a row for each vocabulary group
    vocab, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout, group_desc="vocabulary")
    replica, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout, group_desc="replica")
    saving = saving_group(timeout_s)
    if sequence_group_size == 1:
        return Groups(dist.group.WORLD, vocab, replica, saving=saving)
    ranks = torch.arange(world).view(-1, sequence_group_size)
    sequence, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout, group_desc="sequence")
    return Groups(dist.group.WORLD, vocab, replica, sequence, saving)


def saving_group(timeout_s: float | None) -> ProcessGroup:
    """All ranks, for the thread that saves a run. Collective over the world."""
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    return dist.new_group(None, timeout, None if dist.get_backend() == "fake" else "gloo", group_desc="saving")


def limit_wait(group: ProcessGroup, seconds: float) -> None:
    """Set the timeout of a group that DeepSpeed made."""
    _set_pg_timeout(timedelta(seconds=seconds), group)
