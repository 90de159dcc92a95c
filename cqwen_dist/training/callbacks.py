"""Callbacks: user code that runs during training and may stop the run. Also the result of `train`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cqwen_dist.parallel.collectives import KnownFailure, gather_objects
from cqwen_dist.parallel.stop import StopFlag
from cqwen_dist.run.files import CHECKPOINTS
from cqwen_dist.training.stages import Schedule


@dataclass(frozen=True)
class Moment:
    """The state of a run during a callback: folder, optimizer steps taken and planned, stage name."""

    folder: Path
    step: int
    total_steps: int
    stage: str
    _callbacks: "Callbacks" = field(repr=False, compare=False)

    def stop(self, reason: str) -> None:
        """Stop the run: all ranks agree before the next step, a checkpoint is saved, and `train` returns.

        The result has status "paused" and this reason. The same `train` call resumes the run.
        """
        self._callbacks.ask(reason)


class Callback:
    """Called during training, on rank 0 only. Override the methods that you need.

    If a method raises, the run ends: a checkpoint is saved, and `train` raises `CallbackError` on all ranks.
    """

    def on_stage_start(self, at: Moment) -> None:
        """A stage starts or is resumed."""

    def on_step(self, at: Moment, metrics: Mapping[str, Any]) -> None:
        """The metrics of a step, as in metrics.jsonl, once they are on the host. The next step has already started,
        unless this step was evaluated or saved. The call does not wait for the device."""

    def on_evaluation(self, at: Moment, metrics: Mapping[str, float]) -> None:
        """The held-out metrics, after `on_step` of the same step. Step 0 is the evaluation before training."""

    def on_checkpoint(self, at: Moment, checkpoint: Path) -> None:
        """A checkpoint is complete on disk. It is written in the background, so `at` may be some steps later."""

    def on_stage_end(self, at: Moment) -> None:
        """A stage has ended: the last evaluation is done, and the checkpoint is being written."""


@dataclass(frozen=True)
class TrainResult:
    """The result of `train`; equal on all ranks except for `rank`."""

    folder: Path
    status: str  # "done", or "paused" (by a callback or run.stop_after; the same call resumes the run)
    step: int
    metrics: dict[str, float]  # of the last evaluation
    checkpoint: Path | None  # the newest
    reason: str | None  # given by the callback that stopped the run
    rank: int


class CallbackError(KnownFailure):
    """A callback raised. All ranks raise this error; on the rank of the callback its exception is the cause.

    A failure of the program, even if its text speaks of a timeout: the callback's own request may have met one.
    """


class Callbacks:
    """Calls the callbacks of a run."""

    def __init__(self, callbacks: Sequence[Callback], folder: Path, stop: StopFlag, schedule: Schedule) -> None:
        """callbacks: empty except on rank 0. stop: the stop flag of this rank."""
        self._callbacks, self._folder, self._stop, self._schedule = callbacks, folder, stop, schedule
        self.asked: str | None = None  # reason given by the callback that requested a stop
        self._failure: tuple[str, Exception] | None = None
        self._checkpoints = 0  # number of checkpoints reported so far

    def tell(self, event: str, step: int, stage: str, *found: Any) -> None:
        """Call a method of each callback. An exception is stored and stops the run."""
        # Raising here would leave the other ranks in a collective; `agreed` raises on all ranks instead
        for callback in self._callbacks if self._failure is None else ():
            try:
                getattr(callback, event)(Moment(self._folder, step, self._schedule.total_steps, stage, self), *found)
            except Exception as error:
                text = f"the callback {type(callback).__name__}.{event} raised {type(error).__name__}: {error}"
                self._failure = text, error
                self.ask(text)
                return

    def step(self, record: Mapping[str, Any]) -> None:
        """Call `on_step` with a record of metrics.jsonl."""
        self.tell("on_step", int(record["step"]), str(record["stage"]), dict(record))

    def checkpoints(self, step: int, stage: str, names: Sequence[str]) -> None:
        """Call `on_checkpoint` for complete checkpoints that were not reported yet."""
        for name in names[self._checkpoints :]:
            self.tell("on_checkpoint", step, stage, self._folder / CHECKPOINTS / name)
        self._checkpoints = len(names)

    def ask(self, reason: str) -> None:
        """Request a stop, like a signal."""
        self.asked = self.asked or reason
        self._stop.ask(reason)

    def agreed(self) -> str | None:
        """The reason if a callback, not a signal, stopped the run; otherwise None. Collective over the world.

        Raises `CallbackError` on all ranks if a callback failed.
        """
        text, error = self._failure or (None, None)
        failures, reasons, stops = zip(*gather_objects((text, self.asked, self._stop.reason)), strict=True)
        if failed := next(filter(None, failures), None):
            raise CallbackError(failed) from error
        asked = next((reason for reason in reasons if reason is not None), None)
        return asked if all(stop in (None, asked) for stop in stops) else None
