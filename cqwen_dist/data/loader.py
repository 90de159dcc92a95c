"""Which sample meets which optimizer step on which rank: the same global order on any number of ranks.

An epoch's order is one permutation of (seed, epoch). Step s takes samples [s G, (s+1) G) of it, the last step of an
epoch what is left, so that every sample is seen once an epoch. Rank r takes the r-th contiguous share of the step's
samples: any number of ranks serves any G, shares differ by one at most, and a rank may have none. Every rank makes
the same number of micro-batches in every step (`micro_steps`), where need be of padding, so that collectives and
accumulation line up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from cqwen_dist.batch import Batch
from cqwen_dist.config import UserError
from cqwen_dist.data.collate import Sample, collate


class Samples(Protocol):
    """What a loader needs of a dataset."""

    pad_token_id: int
    num_token_id: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


def share(count: int, rank: int, world: int) -> range:
    """Rank's contiguous share of `count` things; shares differ by one at most, rank 0's is a largest."""
    size, more = divmod(count, world)
    start = rank * size + min(rank, more)
    return range(start, start + size + (rank < more))


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of an epoch [count]; depends on nothing else (MT19937, whose stream numpy keeps for good)."""
    return np.random.RandomState([seed % 2**32, epoch]).permutation(count)


def _micro_batches(dataset: Samples, indices: Sequence[int], micro_batch_size: int, micro_steps: int) -> list[Batch]:
    return [
        collate(
            [dataset[int(i)] for i in indices[k * micro_batch_size : (k + 1) * micro_batch_size]],
            pad_token_id=dataset.pad_token_id,
            num_token_id=dataset.num_token_id,
        )
        for k in range(micro_steps)
    ]


class Loader:
    """Training batches without end, one list of micro-batches per optimizer step.

    Iterating goes on from the current place; the state moves before a step is handed out, so a state taken while
    step s is worked on resumes with step s + 1.

    Args: dataset: its samples; rank, world: this rank and their number; global_batch_size: G, samples per optimizer
    step over all ranks; micro_batch_size: rows per rank and forward at most; seed: of the order.
    Raises: UserError when the dataset is empty.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        rank: int,
        world: int,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int,
    ) -> None:
        if not len(dataset):
            raise UserError("data.train", "no texts", "one or more")
        self.dataset, self.rank, self.world = dataset, rank, world
        self.global_batch_size, self.micro_batch_size, self.seed = global_batch_size, micro_batch_size, seed
        self.micro_steps = -(-len(share(global_batch_size, 0, world)) // micro_batch_size)
        self.steps_per_epoch = -(-len(dataset) // global_batch_size)
        self.epoch, self.step = 0, 0
        self._handed_out = (0, 0)
        self._order: tuple[int, np.ndarray] | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        while True:
            batches = _micro_batches(
                self.dataset, self.mine(self.epoch, self.step), self.micro_batch_size, self.micro_steps
            )
            self._handed_out = (self.epoch, self.step)
            self.step += 1
            if self.step == self.steps_per_epoch:
                self.epoch, self.step = self.epoch + 1, 0
            yield batches

    def indices(self, epoch: int, step: int) -> list[int]:
        """The samples of one step over all ranks, in order."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(len(self.dataset), self.seed, epoch))
        return self._order[1][step * self.global_batch_size : (step + 1) * self.global_batch_size].tolist()

    def mine(self, epoch: int, step: int) -> list[int]:
        """This rank's samples of one step, in order; micro-batch k has [k, k+1) times micro_batch_size of them."""
        indices = self.indices(epoch, step)
        part = share(len(indices), self.rank, self.world)
        return indices[part.start : part.stop]

    def handed_out(self, ranks: Sequence[int] | None = None) -> list[int]:
        """The samples of the step that was handed out last: of all ranks, or of these."""
        indices = self.indices(*self._handed_out)
        if ranks is None:
            return indices
        return [indices[i] for rank in ranks for i in share(len(indices), rank, self.world)]

    def state_dict(self) -> dict[str, int]:
        """Where the next step comes from: {epoch, step}; the same on all ranks and for any number of ranks."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state_dict` was taken. Raises: ValueError for a step that this epoch does not have."""
        epoch, step = state["epoch"], state["step"]
        if epoch < 0 or not 0 <= step < self.steps_per_epoch:
            raise ValueError(f"epoch {epoch}, step {step}: an epoch has {self.steps_per_epoch} steps here")
        self.epoch, self.step = epoch, step


class EvalLoader:
    """Every sample exactly once, in the data's order, split over ranks; each iteration starts anew.

    All ranks make `len(loader)` batches, where need be of padding. Args: as `Loader`'s.
    """

    def __init__(self, dataset: Samples, *, rank: int, world: int, micro_batch_size: int) -> None:
        self.dataset, self.rank, self.world, self.micro_batch_size = dataset, rank, world, micro_batch_size

    def __len__(self) -> int:
        return -(-len(share(len(self.dataset), 0, self.world)) // self.micro_batch_size)

    def __iter__(self) -> Iterator[Batch]:
        mine = share(len(self.dataset), self.rank, self.world)
        for k in range(len(self)):
            yield from _micro_batches(self.dataset, mine[k * self.micro_batch_size :], self.micro_batch_size, 1)
