"""The parts of a run on this rank, as values: `training.assembly` builds them, and start, loop and checkpoints use.

Stages may differ in sequence length and batch size. Consecutive stages with equal ones continue at the same data
position; any other stage starts a new epoch. A position is {epoch, step} and does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.checkpoint.saving import Saver
from cqwen_dist.config.schema import Config
from cqwen_dist.config.trainable import trains_features
from cqwen_dist.data.dataset import TextDataset
from cqwen_dist.data.loader import Loader
from cqwen_dist.data.statistics import NumericStatistics
from cqwen_dist.model.modules import CausalModules
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.training.constraint import Constraint
from cqwen_dist.training.evaluation.run_evaluation import Evaluations
from cqwen_dist.training.features.cache import FeatureCache
from cqwen_dist.training.replicas import Replicas
from cqwen_dist.training.stages import Schedule, StagePlan
from cqwen_dist.training.step import Stepper
from cqwen_dist.training.telemetry.progress import Progress
from cqwen_dist.training.zero.engine import Engine

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


class Base(NamedTuple):
    """A base model. head, table: lazy output head and token table, if ZeRO-3 has partitioned the model."""

    model: Any
    head: Any = None
    table: Any = None


class Words(NamedTuple):
    """Facts about the vocabulary, from the tokenizer and the data."""

    num_token_id: int
    used_rows: int  # the tokenizer uses only rows below this one
    counts: np.ndarray  # [V]: occurrences in the training data
    numerals: Sequence[int] = ()  # tokens with which the base spells numerals
    line_ends: Sequence[int] = ()  # tokens that end a line


@dataclass(frozen=True)
class Training:
    """The parts that take optimizer steps on this rank."""

    config: Config
    runtime: Runtime
    groups: Groups
    model: CausalModules
    engine: Engine
    constraint: Constraint
    stepper: Stepper
    replicas: Replicas
    schedule: Schedule
    words: Words

    def enter_stage(self, plan: StagePlan, fresh: bool) -> None:
        """Set the trained groups. fresh: the stage starts (not resumed), so newly trained groups get zero moments."""
        self.engine.enter_stage(plan, self.schedule.newly_trained(plan) if fresh else frozenset())
        self.constraint.features_moved = any(
            trains_features(p.stage.groups) for p in self.schedule.plans[: plan.index + 1]
        )

    def forward(self, batch: Batch, keep: Tensor) -> Tensor:
        """z at the label positions `keep`, outside of steps. Raises `Stopped` as `check_stop` does."""
        self.check_stop()
        return self.engine.forward(batch, keep)

    def check_stop(self) -> None:
        """Raises `Stopped` on all ranks if any rank received a stop request. Collective over the world."""
        self.runtime.hang.alive()
        self.runtime.stop.agreed(self.runtime.device)

    def forward_held_out(self, batch: Batch, keep: Tensor) -> Tensor:
        """`forward` for held-out texts. The side network was not fitted to them, and runs in eval mode."""
        if self.model.beside is None:
            return self.forward(batch, keep)
        self.model.beside.eval()
        try:
            return self.forward(batch, keep)
        finally:
            self.model.beside.train()


@dataclass(frozen=True)
class Run(Training):
    """A run on this rank, ready for `training.start` and `training.trainer`."""

    folder: Path
    resume_from: Path | None  # checkpoint folder
    texts: TextDataset  # training texts
    reports: list[str]  # on the data, for people
    columns: dict[str, dict[str, Any]] | None  # a table's columns (`data.columns`)
    statistics: NumericStatistics
    inputs: dict[str, str]  # digests of data, tokenizer and base (`checkpoint.resume`)
    loaders: StageLoaders
    cache: FeatureCache
    evaluations: Evaluations
    saver: Saver
    progress: Progress

    def at(self, what: str, done: int, of: int) -> None:
        """Show progress during the start. Raises `Stopped` as `check_stop` does."""
        self.check_stop()
        self.progress.part(what, done, of)

    def calibration_loader(self, tokens: int, numbers: int = 0) -> Loader:
        """A loader whose first step has this rank's share of the calibration texts.

        Over all ranks these texts have about `tokens` tokens and at least about `numbers` numbers. They are the same
        for any number of ranks.
        """
        report = self.texts.report
        share = max(tokens / report.tokens, numbers / max(self.statistics.count, 1))
        samples = min(max(1, round(share * report.sequences)), report.sequences)
        return Loader(
            self.texts,
            global_batch_size=samples,
            micro_batch_size=self.config.train.micro_batch_size,
            seed=self.config.train.seed,
            **self.groups.reading,
        )
