"""Which sample meets which optimizer step on which rank: the same global order on any number of ranks.

An epoch's order is one permutation of (seed, epoch). Step s takes samples [s G, (s+1) G) of it; an epoch's last step
takes what is left. Rank r takes the r-th contiguous share of the step's samples: shares differ by one at most, and a
rank may have none. Every rank makes the same number of micro-batches in every step (`micro_steps`), some of padding
alone, so that collectives and accumulation line up. A thread may make batches ahead of time, in page-locked memory if
there is a GPU; the saved place is the one after the last step handed out.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from queue import Queue
from typing import TypeVar

import numpy as np
import torch

from cqwen_dist.batch import Batch
from cqwen_dist.config import UserError
from cqwen_dist.data.collate import collate
from cqwen_dist.data.dataset import TextDataset

T = TypeVar("T")

_GROUPED = 50  # steps whose samples are sorted by length together


def share(count: int, rank: int, world: int) -> range:
    """Rank's contiguous share of `count` things; shares differ by one at most, and none is larger than rank 0's."""
    size, more = divmod(count, world)
    start = rank * size + min(rank, more)
    return range(start, start + size + (rank < more))


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of an epoch [count]; depends on nothing else (MT19937, whose stream numpy keeps for good)."""
    return np.random.RandomState([seed % 2**32, epoch]).permutation(count)


def grouped_order(lengths: np.ndarray, seed: int, epoch: int, batch: int) -> np.ndarray:
    """`epoch_order` with samples of similar length in one step of `batch`: every 50 steps' samples are sorted by
    length, cut into steps again, and the steps shuffled; an incomplete last step stays last."""
    order = epoch_order(len(lengths), seed, epoch)
    whole = len(order) // batch
    for begin in range(0, whole * batch, _GROUPED * batch):
        mine = order[begin : min(begin + _GROUPED * batch, whole * batch)]
        mine[:] = mine[np.argsort(-lengths[mine], kind="stable")]
    steps = np.random.RandomState([seed % 2**32, epoch, 1]).permutation(whole)
    return np.concatenate([order[: whole * batch].reshape(whole, batch)[steps].ravel(), order[whole * batch :]])


JOIN_S = 10.0  # longest wait for a thread that may hang on a dead disk


def ahead(items: Iterator[T], count: int) -> Generator[T, None, None]:
    """The items, up to `count` of them made ahead of time by a thread; an error in the thread is raised here."""
    if not count:
        yield from items
        return
    made: Queue[tuple[T | None, BaseException | None]] = Queue()
    room = threading.Semaphore(count)
    stop = threading.Event()

    def work() -> None:
        try:
            for item in items:
                room.acquire()
                if stop.is_set():
                    return
                made.put((item, None))
            made.put((None, StopIteration()))
        except BaseException as error:
            made.put((None, error))

    thread = threading.Thread(target=work, name="cqwen-loader", daemon=True)
    thread.start()
    try:
        while True:
            item, error = made.get()
            room.release()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        stop.set()
        room.release()
        # A process that ends while the thread is inside torch is aborted ("terminate called without an active
        # exception"), though all its work was done.
        thread.join(JOIN_S)


def _micro_batches(
    dataset: TextDataset, indices: Sequence[int], micro_batch_size: int, micro_steps: int
) -> list[Batch]:
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

    Iterating goes on from the current place. The place moves before a step is handed out: a state taken during step s
    resumes with step s + 1.

    Args: global_batch_size: G, samples per optimizer step over all ranks; micro_batch_size: rows per rank and forward
    at most; seed: of the order; prefetch: steps made ahead of time. Raises: UserError when the dataset is empty.
    """

    def __init__(
        self,
        dataset: TextDataset,
        *,
        rank: int,
        world: int,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int,
        prefetch: int = 0,
    ) -> None:
        if not len(dataset):
            raise UserError("data.train", "no texts", "one or more")
        self.dataset, self.rank, self.world = dataset, rank, world
        self.global_batch_size, self.micro_batch_size, self.seed = global_batch_size, micro_batch_size, seed
        self.micro_steps = -(-len(share(global_batch_size, 0, world)) // micro_batch_size)
        self.steps_per_epoch = -(-len(dataset) // global_batch_size)
        self.epoch, self.step, self.prefetch = 0, 0, prefetch
        self._handed_out = (0, 0)
        self._orders: dict[int, np.ndarray] = {}
        self._lengths = dataset.lengths() if dataset.group_by_length else None

    def __iter__(self) -> Generator[list[Batch], None, None]:
        with closing(ahead(self._made(), self.prefetch)) as made:
            for epoch, step, batches in made:
                self._handed_out = (epoch, step)
                self.epoch, self.step = self._behind(epoch, step)
                yield batches

    def _made(self) -> Iterator[tuple[int, int, list[Batch]]]:
        """(epoch, step, its batches) from the current place on."""
        epoch, step, pin = self.epoch, self.step, torch.cuda.is_available()
        while True:
            batches = _micro_batches(self.dataset, self.mine(epoch, step), self.micro_batch_size, self.micro_steps)
            yield epoch, step, [batch.pin_memory() for batch in batches] if pin else batches
            epoch, step = self._behind(epoch, step)

    def _behind(self, epoch: int, step: int) -> tuple[int, int]:
        return (epoch, step + 1) if step + 1 < self.steps_per_epoch else (epoch + 1, 0)

    def indices(self, epoch: int, step: int) -> list[int]:
        """The samples of one step over all ranks, in order."""
        order = self._orders.get(epoch)
        if order is None:
            if self._lengths is None:
                order = epoch_order(len(self.dataset), self.seed, epoch)
            else:
                order = grouped_order(self._lengths, self.seed, epoch, self.global_batch_size)
            # This epoch's, and the one that a thread may be ahead in.
            self._orders = {**{e: known for e, known in self._orders.items() if abs(e - epoch) == 1}, epoch: order}
        return order[step * self.global_batch_size : (step + 1) * self.global_batch_size].tolist()

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

    All ranks make `len(loader)` batches, some of padding alone. Args: as `Loader`'s.
    """

    def __init__(self, dataset: TextDataset, *, rank: int, world: int, micro_batch_size: int) -> None:
        self.dataset, self.rank, self.world, self.micro_batch_size = dataset, rank, world, micro_batch_size

    def __len__(self) -> int:
        return -(-len(share(len(self.dataset), 0, self.world)) // self.micro_batch_size)

    def __iter__(self) -> Iterator[Batch]:
        mine = share(len(self.dataset), self.rank, self.world)
        for k in range(len(self)):
            yield from _micro_batches(self.dataset, mine[k * self.micro_batch_size :], self.micro_batch_size, 1)
