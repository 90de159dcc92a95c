"""What a user's own code sees of a run: callbacks during training, through which it can stop it, and the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cqwen_dist.parallel.collectives import gather_objects
from cqwen_dist.parallel.stop import StopFlag
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

        Its result has the status "paused" and this reason; the same call goes on from there.
        """
        self._callbacks.ask(reason)


class Callback:
    """Called during training, on rank 0 only; override what you need.

    A method that raises ends the run: a checkpoint is saved, and `train` raises `CallbackError` on every rank.
    """

    def on_stage_start(self, at: Moment) -> None:
        """A stage begins or is resumed."""

    def on_step(self, at: Moment, metrics: Mapping[str, Any]) -> None:
        """A step's metrics, as in metrics.jsonl, once they are on the host. By then the next step has begun, unless
        this one was evaluated or saved. A call never waits for the device."""

    def on_evaluation(self, at: Moment, metrics: Mapping[str, float]) -> None:
        """The held-out metrics, after `on_step` of the same step; at step 0 those before training."""

    def on_checkpoint(self, at: Moment, checkpoint: Path) -> None:
        """A checkpoint is complete on the disk. As it is written in the background, `at` may be some steps later."""

    def on_stage_end(self, at: Moment) -> None:
        """A stage is over: its last evaluation is made, its checkpoint begun."""


@dataclass(frozen=True)
class TrainResult:
    """How a call of `train` ended; the same on every rank except for `rank`.

    status: "done", or "paused": stopped by a callback or run.stop_after, and the same call goes on. metrics: of the
    last evaluation. checkpoint: the newest, if any. reason: a callback's.
    """

    folder: Path
    status: str
    step: int
    metrics: dict[str, float]
    checkpoint: Path | None
    reason: str | None
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
        self._seen = 0  # checkpoints that callbacks know of

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

    def checkpoints(self, step: int, stage: str, folder: Path, whole: Sequence[str]) -> None:
        """Call `on_checkpoint` for those that are new in `whole`."""
        for name in whole[self._seen :]:
            self.tell("on_checkpoint", step, stage, folder / name)
        self._seen = len(whole)

    def ask(self, reason: str) -> None:
        """Stop the run, as a signal does."""
        self.asked = self.asked or reason
        self._stop.ask(reason)

    def agreed(self) -> str | None:
        """The reason if a callback, and no signal, stopped the run; else None. Collective over the world.

        Raises `CallbackError` on every rank where one failed.
        """
        failure = self._failure and self._failure[0]
        everyone = gather_objects((failure, self.asked, self._stop.reason))
        for failed, _, _ in everyone:
            if failed is not None:
                raise CallbackError(failed) from (self._failure and self._failure[1])
        asked = next((reason for _, reason, _ in everyone if reason is not None), None)
        return asked if all(stop in (None, asked) for _, _, stop in everyone) else None
