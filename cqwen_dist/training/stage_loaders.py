"""The training batches of a run whose stages may differ in sequence length and batch size.

Consecutive stages of equal batch size and sequence length share a position in the data; any other stage begins a new
epoch. A position is {epoch, step}, the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from cqwen_dist.batch import Batch
from cqwen_dist.config import Config
from cqwen_dist.data.dataset import TextDataset
from cqwen_dist.data.loader import Loader
from cqwen_dist.training.stages import StagePlan


class StageLoaders:
    """One loader per stage; stages share the texts in memory."""

    def __init__(self, dataset: TextDataset, config: Config, rank: int, world: int) -> None:
        by_length = {config.data.sequence_length: dataset}
        self._loaders: list[Loader] = []
        for stage in config.stages:
            length = stage.sequence_length or config.data.sequence_length
            if length not in by_length:
                by_length[length] = dataset.with_length(length)
            size, micro = config.batch_sizes(stage)
            self._loaders.append(
                Loader(
                    by_length[length],
                    rank=rank,
                    world=world,
                    global_batch_size=size,
                    micro_batch_size=micro,
                    seed=config.train.seed,
                    prefetch=config.data.prefetch,
                )
            )
        self._index = 0
        self._batches: Generator[list[Batch], None, None] | None = None

    @property
    def steps_per_epoch(self) -> list[int]:
        """By stage."""
        return [loader.steps_per_epoch for loader in self._loaders]

    @property
    def current(self) -> Loader:
        """The loader of the stage that was entered last."""
        return self._loaders[self._index]

    def enter(self, plan: StagePlan) -> Iterator[list[Batch]]:
        """The batches of a stage, from where the stage before stopped, or from a new epoch."""
        before = self.current
        self._index = plan.index
        now = self.current
        if now is not before:
            alike = before.dataset is now.dataset and before.global_batch_size == now.global_batch_size
            now.load_state_dict(before.state_dict() if alike else _next_epoch(before.epoch, before.step))
        self.close()
        self._batches = iter(now)
        return self._batches

    def close(self) -> None:
        """End the prefetching thread."""
        if self._batches is not None:
            self._batches.close()

    def state_dict(self) -> dict[str, int]:
        """The position of the current stage's next step."""
        return {"stage": self._index, **self.current.state_dict()}

    def load_state_dict(self, state: dict[str, int], other_texts: bool = False) -> None:
        """Restore what `state_dict` returned. other_texts: the data has been exchanged, so a new epoch begins."""
        self._index, epoch, step = state["stage"], state["epoch"], state["step"]
        self.current.load_state_dict(_next_epoch(epoch, step) if other_texts else {"epoch": epoch, "step": step})


def _next_epoch(epoch: int, step: int) -> dict[str, int]:
    """The start of the first epoch that has not begun at a position."""
    return {"epoch": epoch + (step > 0), "step": 0}
