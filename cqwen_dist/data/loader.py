"""Assigns samples to optimizer steps and ranks. The global order is the same on any number of ranks.

An epoch's order is a permutation that depends on (seed, epoch). Step s takes samples [s G, (s+1) G) of it; the last
step of an epoch takes the remaining ones. Rank r takes the r-th contiguous share of a step. Shares differ by at most
one, and a rank may have no samples. The ranks of a sequence group count as one here: they have the same samples, and
each keeps its part of the positions. Every rank makes the same number of micro-batches in every step (`micro_steps`),
some with padding only, so that collectives and accumulation line up. A thread can make batches ahead of time, in
page-locked memory if there is a GPU. The saved position is the one after the last step handed out.
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import TypeVar

import numpy as np
import torch

from cqwen_dist.batch import Batch
from cqwen_dist.config.errors import UserError
from cqwen_dist.data.collate import collate
from cqwen_dist.data.dataset import TextDataset

T = TypeVar("T")


def share(count: int, rank: int, world: int) -> range:
    """A rank's contiguous share of range(count). Shares differ by at most one, and rank 0's is the largest."""
    size, more = divmod(count, world)
    start = rank * size + min(rank, more)
    return range(start, start + size + (rank < more))


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """[count] permutation of an epoch; a function of the arguments (MT19937, whose stream numpy guarantees forever)."""
    return np.random.RandomState([seed % 2**32, epoch]).permutation(count)


def ahead(items: Iterator[T], count: int) -> Generator[T, None, None]:
    """Yield the items, none of which is None. A thread makes up to `count` of them ahead of time; its errors are raised
    here."""
    if not count:
        yield from items
        return
    # The thread has ended when this does: if the process ended while it is inside torch, C++ would abort it ("terminate
    # called without an active exception") after a successful run.
    with ThreadPoolExecutor(1, "cqwen-loader") as pool:
        made = deque(pool.submit(next, items, None) for _ in range(count))
        try:
            while (item := made.popleft().result()) is not None:
                made.append(pool.submit(next, items, None))
                yield item
        finally:
            for future in made:
                future.cancel()


@dataclass(eq=False)
class RankReader:
    """Reads a rank's samples in micro-batches.

    rank, world: index and number of the sequence groups; part, parts: index and number of the ranks in a group
    (`Groups.reading`); micro_batch_size: maximum rows per rank and forward pass.
    """

    dataset: TextDataset
    _: KW_ONLY
    rank: int
    world: int
    micro_batch_size: int
    part: int = 0
    parts: int = 1

    def micro_batches(self, indices: Sequence[int], count: int) -> list[Batch]:
        """The first `count` micro-batches of these samples, with padding only behind the last one."""
        size, dataset = self.micro_batch_size, self.dataset
        tokens = {"pad_token_id": dataset.pad_token_id, "num_token_id": dataset.num_token_id}
        rows = ([dataset[int(i)] for i in indices[k * size : (k + 1) * size]] for k in range(count))
        return [collate(samples, **tokens, parts=self.parts).part(self.part, self.parts) for samples in rows]


@dataclass(eq=False)
class Loader(RankReader):
    """Endless training batches: one list of micro-batches per optimizer step.

    Iteration continues from the current position. The position moves before a step is handed out, so a state taken
    during step s resumes with step s + 1.

    global_batch_size: G, samples per optimizer step over all ranks; seed: seeds the order; prefetch: steps made ahead
    of time. Raises: UserError for an empty dataset.
    """

    _: KW_ONLY
    global_batch_size: int
    seed: int
    prefetch: int = 0

    def __post_init__(self) -> None:
        if not len(self.dataset):
            raise UserError("data.train", "no texts", "one or more")
        self.micro_steps = -(-len(share(self.global_batch_size, 0, self.world)) // self.micro_batch_size)
        self.steps_per_epoch = -(-len(self.dataset) // self.global_batch_size)
        self.epoch = self.step = 0
        self._handed_out = (0, 0)
        self._orders: dict[int, np.ndarray] = {}

    def __iter__(self) -> Generator[list[Batch], None, None]:
        with closing(ahead(self._made(), self.prefetch)) as made:
            for epoch, step, batches in made:
                # Move the position before yielding: the trainer may save its state during this step.
                self._handed_out = (epoch, step)
                self.epoch, self.step = self._behind(epoch, step)
                yield batches

    def _made(self) -> Iterator[tuple[int, int, list[Batch]]]:
        epoch, step, pin = self.epoch, self.step, torch.cuda.is_available()
        while True:
            batches = self.micro_batches(self.mine(epoch, step), self.micro_steps)
            yield epoch, step, [batch.pin_memory() for batch in batches] if pin else batches
            epoch, step = self._behind(epoch, step)

    def _behind(self, epoch: int, step: int) -> tuple[int, int]:
        return (epoch, step + 1) if step + 1 < self.steps_per_epoch else (epoch + 1, 0)

    def indices(self, epoch: int, step: int) -> list[int]:
        """The samples of a step over all ranks, in order."""
        order = self._orders.get(epoch)
        if order is None:
            order = epoch_order(len(self.dataset), self.seed, epoch)
            # Keep the neighbouring epoch too: the prefetch thread may already be in the next one.
            self._orders = {**{e: known for e, known in self._orders.items() if abs(e - epoch) == 1}, epoch: order}
        return order[step * self.global_batch_size : (step + 1) * self.global_batch_size].tolist()

    def mine(self, epoch: int, step: int) -> list[int]:
        """This rank's samples of a step, in order. Micro-batch k has samples [k, k+1) times micro_batch_size."""
        indices = self.indices(epoch, step)
        part = share(len(indices), self.rank, self.world)
        return indices[part.start : part.stop]

    def handed_out(self, ranks: Sequence[int] | None = None) -> list[int]:
        """The samples of the last step handed out, from all ranks or from `ranks` (of the world)."""
        indices = self.indices(*self._handed_out)
        if ranks is None:
            return indices
        sharers = sorted({rank // self.parts for rank in ranks})
        return [indices[i] for rank in sharers for i in share(len(indices), rank, self.world)]

    def state_dict(self) -> dict[str, int]:
        """Position of the next step: {epoch, step}. Equal on all ranks and independent of their number."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where `state_dict` was taken. Raises: ValueError for a step beyond the epoch's end."""
        epoch, step = state["epoch"], state["step"]
        if epoch < 0 or not 0 <= step < self.steps_per_epoch:
            raise ValueError(f"epoch {epoch}, step {step}: an epoch has {self.steps_per_epoch} steps here")
        self.epoch, self.step = epoch, step


@dataclass(eq=False)
class EvalLoader(RankReader):
    """Every sample exactly once, in order, split over ranks. Each iteration restarts.

    All ranks make `len(loader)` batches, some with padding only. every: the samples of all ranks, by default the whole
    dataset.
    """

    every: InitVar[Sequence[int] | None] = None

    def __post_init__(self, every: Sequence[int] | None) -> None:
        every = range(len(self.dataset)) if every is None else every
        mine = share(len(every), self.rank, self.world)
        self.samples = every[mine.start : mine.stop]  # this rank's
        self._batches = -(-len(share(len(every), 0, self.world)) // self.micro_batch_size)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        for k in range(len(self)):
            yield from self.micro_batches(self.samples[k * self.micro_batch_size :], 1)
