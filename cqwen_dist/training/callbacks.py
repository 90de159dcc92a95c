"""Callbacks: a user's own code during training, which may stop the run; and the result of a call of `train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cqwen_dist.parallel.collectives import gather_objects
from cqwen_dist.parallel.stop import StopFlag
from cqwen_dist.run.files import CHECKPOINTS
from cqwen_dist.training.stages import Schedule


@dataclass(frozen=True)
class Moment:
    """Where a run is when a callback is called: its folder, optimizer steps taken and planned, the stage's name."""

    folder: Path
    step: int
    total_steps: int
    stage: str
    _callbacks: Callbacks = field(repr=False, compare=False)

    def stop(self, reason: str) -> None:
        """End the run in order: all ranks agree before the next step, a checkpoint is saved, `train` returns.

        The result has the status "paused" and this reason. The same call of `train` resumes the run.
        """
        self._callbacks.ask(reason)


class Callback:
    """Called during training, on rank 0 only; override what you need.

    A method that raises ends the run: a checkpoint is saved, and `train` raises `CallbackError` on every rank.
    """

    def on_stage_start(self, at: Moment) -> None:
        """A stage begins or is resumed."""

    def on_step(self, at: Moment, metrics: Mapping[str, Any]) -> None:
        """A step's metrics, as in metrics.jsonl, once they are on the host. The next step has begun by then, unless
        this step was evaluated or saved. The call does not wait for the device."""

    def on_evaluation(self, at: Moment, metrics: Mapping[str, float]) -> None:
        """The held-out metrics, after `on_step` of the same step; at step 0 those before training."""

    def on_checkpoint(self, at: Moment, checkpoint: Path) -> None:
        """A checkpoint is complete on the disk. It is written in the background, so `at` may be some steps later."""

    def on_stage_end(self, at: Moment) -> None:
        """A stage has ended: its last evaluation is done, its checkpoint is being written."""


@dataclass(frozen=True)
class TrainResult:
    """How a call of `train` ended; the same on every rank except for `rank`."""

    folder: Path
    status: str  # "done", or "paused": stopped by a callback or run.stop_after, and the same call resumes it
    step: int
    metrics: dict[str, float]  # of the last evaluation
    checkpoint: Path | None  # the newest
    reason: str | None  # of the callback that stopped the run
    rank: int


class CallbackError(RuntimeError):
    """A callback raised. Every rank raises this; on the rank where it happened its own exception is the cause."""


class Callbacks:
    """Calls a run's callbacks."""

    def __init__(self, callbacks: Sequence[Callback], folder: Path, stop: StopFlag, schedule: Schedule) -> None:
        """callbacks: empty on all ranks but the main one. stop: this rank's."""
        self._callbacks, self._folder, self._stop, self._schedule = callbacks, folder, stop, schedule
        self.asked: str | None = None  # the reason of the callback that asked to stop
        self._failure: tuple[str, Exception] | None = None
        self._checkpoints = 0  # how many callbacks know of

    def tell(self, event: str, step: int, stage: str, *found: Any) -> None:
        """Call this method of each callback. An exception is kept, and stops the run."""
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
        """Call `on_checkpoint` for the new ones of these complete checkpoints."""
        for name in names[self._checkpoints :]:
            self.tell("on_checkpoint", step, stage, self._folder / CHECKPOINTS / name)
        self._checkpoints = len(names)

    def ask(self, reason: str) -> None:
        """Stop the run, as a signal does."""
        self.asked = self.asked or reason
        self._stop.ask(reason)

    def agreed(self) -> str | None:
        """The reason if a callback, and no signal, stopped the run; else None. Collective over the world.

        Raises `CallbackError` on every rank where one failed.
        """
        text, error = self._failure or (None, None)
        failures, reasons, stops = zip(*gather_objects((text, self.asked, self._stop.reason)), strict=True)
        if failed := next(filter(None, failures), None):
            raise CallbackError(failed) from error
        asked = next((reason for reason in reasons if reason is not None), None)
        return asked if all(stop in (None, asked) for stop in stops) else None
