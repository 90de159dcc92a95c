"""The training batches of a run whose stages may differ in sequence length and batch size.

Consecutive stages with equal batch size and sequence length continue at the same data position; any other stage starts
a new epoch. A position is {epoch, step} and does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence

from cqwen_dist.batch import Batch
from cqwen_dist.data.dataset import TextDataset
from cqwen_dist.data.loader import Loader
from cqwen_dist.training.stages import StagePlan

PREFETCH = 2  # steps whose batches are made ahead of time


class StageLoaders:
    """One loader per stage; stages share the texts in memory."""

    def __init__(
        self, dataset: TextDataset, shapes: Sequence[tuple[int, int, int]], seed: int, reading: Mapping[str, int]
    ) -> None:
        """shapes: (sequence length, global batch size, micro-batch size) of each stage. reading: `Groups.reading`."""
        # One cut of the texts for each length, shared by the stages that use it
        texts = {length: dataset.with_length(length) for length in {length for length, _, _ in shapes}}
        self._loaders = [
            Loader(
                texts[length], global_batch_size=size, micro_batch_size=micro, seed=seed, prefetch=PREFETCH, **reading
            )
            for length, size, micro in shapes
        ]
        self.steps_per_epoch = [loader.steps_per_epoch for loader in self._loaders]  # by stage
        self._index = 0
        self._batches: Generator[list[Batch], None, None] | None = None

    @property
    def current(self) -> Loader:
        """The loader of the current stage."""
        return self._loaders[self._index]

    def enter(self, plan: StagePlan) -> Iterator[list[Batch]]:
        """The batches of a stage: continues where the previous stage stopped, or starts a new epoch."""
        before, now = self.current, self._loaders[plan.index]
        self._index = plan.index
        if now is not before:
            alike = before.dataset is now.dataset and before.global_batch_size == now.global_batch_size
            now.load_state_dict(before.state_dict() if alike else _next_epoch(before.state_dict()))
        # The old loader's thread would go on making batches of the stage before
        self.close()
        self._batches = iter(now)
        return self._batches

    def close(self) -> None:
        """End the prefetching thread."""
        if self._batches is not None:
            self._batches.close()

    def state_dict(self) -> dict[str, int]:
        """The data position of the next step."""
        return {"stage": self._index, **self.current.state_dict()}

    def load_state_dict(self, state: dict[str, int], other_texts: bool = False) -> None:
        """Restore a `state_dict`. other_texts: the data has changed, so start a new epoch."""
        self._index = state["stage"]
        self.current.load_state_dict(_next_epoch(state) if other_texts else state)


def _next_epoch(state: dict[str, int]) -> dict[str, int]:
    """Position of the first epoch that has not started at this position."""
    return {"epoch": state["epoch"] + (state["step"] > 0), "step": 0}
