"""The parts of a run on this rank, as values: `training.assembly` builds them, and start, loop and checkpoints use.

Evaluations are of held-out texts, and of watched texts of other kinds that are never trained on.

watch/NAME/accuracy       argmax P at all labelled positions of `data.watch.NAME`
watch/NAME/base_accuracy  top-1 of the base model on them; likewise perplexity, base_perplexity and cls_loss_mean

Rank 0 writes chart data to RUN/evaluations, for the evaluation before training and the last one of each stage:

step-00000150.json        {"step", "stage", "numbers": the drawing of `number_metrics`}

Stages may differ in sequence length and batch size. Consecutive stages with equal ones continue at the same data
position; any other stage starts a new epoch. A position is {epoch, step} and does not depend on the number of ranks.
"""

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.checkpoint.saving import Saver
from cqwen_dist.config.schema import Config
from cqwen_dist.config.shape import NONE
from cqwen_dist.config.trainable import trains_features
from cqwen_dist.data.dataset import TextDataset
from cqwen_dist.data.loader import Loader
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.heads.targets import NumericStatistics
from cqwen_dist.model.modules import CausalModules
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.run.files import read_object, write_atomically
from cqwen_dist.training.constraint import Constraint
from cqwen_dist.training.evaluation.evaluator import Evaluator
from cqwen_dist.training.evaluation.number_metrics import CALIBRATION
from cqwen_dist.training.features.cache import FeatureCache
from cqwen_dist.training.replicas import Replicas
from cqwen_dist.training.stages import Schedule, StagePlan
from cqwen_dist.training.step import Stepper
from cqwen_dist.training.telemetry.progress import Progress
from cqwen_dist.training.zero.engine import Engine

WATCHED = ("accuracy", "base_accuracy", "perplexity", "base_perplexity", "cls_loss_mean")


@dataclass(frozen=True)
class Evaluations:
    """Evaluates a run before and during training. Collective over the world."""

    held_out: Evaluator | None  # None without held-out texts
    watched: dict[str, Evaluator]  # by name
    folder: Path | None  # for chart data; None except on rank 0
    once: Callable[[str, Callable[[], dict[str, float]]], dict[str, float]]
    """A measure of the base by name, which a run of this process may already have."""

    @property
    def base_accuracy(self) -> float | None:
        """Top-1 of the base model on the held-out texts."""
        return None if self.held_out is None else self.held_out.base.get("eval/base_accuracy")

    def measure_base(self) -> None:
        """Measure the base model, which has only words to compare. Only before training."""
        for name, evaluator in {"": self.held_out, **self.watched}.items():
            if evaluator is not None and evaluator.of_words:
                evaluator.base = dict(self.once(name, evaluator.measure_base))

    def __call__(self, step: int, stage: str) -> dict[str, Any]:
        """The metrics after `step`, equal on all ranks. Also stores chart data for a report."""
        metrics: dict[str, Any] = {}
        for name, evaluator in self.watched.items():
            found = evaluator.words()
            metrics |= {f"watch/{name}/{key}": found[f"eval/{key}"] for key in WATCHED if f"eval/{key}" in found}
        if self.held_out is not None:
            metrics |= self.held_out()
            if self.folder is not None:
                self._write(self.folder, step, stage, self.held_out)
        return metrics

    def shown(self, metrics: dict[str, Any]) -> str:
        """The main metrics in one line for the user; empty without evaluators."""
        parts = []
        if "eval/accuracy" in metrics:
            base = f" (base {metrics['eval/base_accuracy']:.1%})" if "eval/base_accuracy" in metrics else ""
            parts.append(f"accuracy {metrics['eval/accuracy']:.1%}{base}")
            parts.append(f"<NUM> F1 {metrics['eval/num_f1']:.3f}")
        if "eval/reg_mdae" in metrics:
            parts.append(f"MdAE {metrics['eval/reg_mdae']:.4g}")
        if "eval/baseline_mdae" in metrics:
            parts.append(f"always the median's {metrics['eval/baseline_mdae']:.4g}")
        for name in self.watched:
            now, base = (metrics[f"watch/{name}/{key}"] for key in ("accuracy", "base_accuracy"))
            parts.append(f"{name} {now:.1%} (base {base:.1%})")
        return ", ".join(parts)

    def _write(self, folder: Path, step: int, stage: str, held_out: Evaluator) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"step": step, "stage": stage, "numbers": held_out.drawing, "words": held_out.word_risk}
        write_atomically(folder / f"step-{step:08d}.json", json.dumps(content, ensure_ascii=False))
        for other in folder.glob("step-" + 8 * "[0-9]" + ".json"):
            at = int(other.stem.removeprefix("step-"))
            if at > step or (0 < at < step and read_object(other).get("stage") == stage):
                other.unlink()

    def factors(self) -> dict[str, Any]:
        """Interval factors of the last evaluation for the metrics in a checkpoint; {} without factors."""
        known = None if self.held_out is None else self.held_out.factors
        return {} if known is None else {CALIBRATION: known.to_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Metrics of the base model, which cannot be measured again after training has started."""
        watched = {name: evaluator.base for name, evaluator in self.watched.items()}
        return {"base": {} if self.held_out is None else self.held_out.base, "watch": watched}

    def load_state_dict(self, state: dict[str, Any], factors: dict[str, Any] | None) -> None:
        """Restore `state_dict` and `factors`."""
        for name, base in state["watch"].items():
            self.watched[name].base = base
        if self.held_out is not None:
            self.held_out.base = state["base"]
            self.held_out.factors = None if factors is None else Intervals.from_dict(factors)


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


# The numbers that the start's regression is fitted to, and at most so many tokens are read for them. Fitted to the 60
# numbers of 4,096 tokens, the quickstart ran away with some seeds. Candidates have more rows (docs/measurements.md).
START_NUMBERS, WITH_CANDIDATES, START_TOKENS = 2000, 5000, 1 << 16


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
    symbols: dict[str, list[int]] | None = None  # tokens that are signs of arithmetic
    constants: Sequence[float] = ()  # the commonest numbers
    digit_rows: Sequence[int] = ()  # tokens of a numeral's characters, if digits are kept in view


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

    def calibration_loader(self, tokens: int, numbers: int | None = 0) -> Loader:
        """A loader whose first step has this rank's share of the calibration texts.

        Over all ranks these texts have about `tokens` tokens and at least about `numbers` numbers (None:
        `START_NUMBERS` or `WITH_CANDIDATES`, or those in `START_TOKENS`). They are the same for any number of ranks.
        """
        report = self.texts.report
        if numbers is None:
            most = START_NUMBERS if self.model.config.candidates == NONE else WITH_CANDIDATES
            numbers = min(most, self.statistics.count * START_TOKENS // report.tokens)
        share = max(tokens / report.tokens, numbers / max(self.statistics.count, 1))
        samples = min(max(1, round(share * report.sequences)), report.sequences)
        return Loader(
            self.texts,
            global_batch_size=samples,
            micro_batch_size=self.config.train.micro_batch_size,
            seed=self.config.train.seed,
            **self.groups.reading,
        )
