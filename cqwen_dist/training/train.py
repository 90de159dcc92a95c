"""One training command from start to end: opens and locks the run, builds it, starts or resumes it, trains, and records
the end in status.json."""

import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from cqwen_dist.checkpoint.mirror import Mirror
from cqwen_dist.config import Config, DiskError, Said, reason_of
from cqwen_dist.parallel.collectives import Stopped, agree, cause_of, from_main_rank, main_rank_first
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.runtime import Runtime, distributed
from cqwen_dist.parallel.stop import StopFlag
from cqwen_dist.run.files import AWAY, CHECKPOINTS, METRICS, REFUSED, words_of_disk
from cqwen_dist.run.folder import open_run, refuse_changes, run_lock, starts_over
from cqwen_dist.run.status import RunStatus, end_status, read_status
from cqwen_dist.sizes.architecture import Architecture
from cqwen_dist.sizes.flops import Work, peak_tflops
from cqwen_dist.training.assembly import build_run, groups_of
from cqwen_dist.training.callbacks import Callback, Callbacks, TrainResult
from cqwen_dist.training.inputs import config_facts, refuse_accelerate
from cqwen_dist.training.shared import Shared
from cqwen_dist.training.start import begin, open_log
from cqwen_dist.training.telemetry.metrics import MetricsFile
from cqwen_dist.training.telemetry.progress import Clock, Progress
from cqwen_dist.training.trainer import Trainer

REASON = 400  # most characters of an error message in status.json; torch's messages may have pages


@contextmanager
def open_session(
    config: Config, runtime: Runtime, write_inputs: Callable[[], None] = lambda: None
) -> Iterator[RunStatus]:
    """Open and lock the run folder for the duration of the context. Collective over the world.

    write_inputs: called on rank 0 once the folder is known to belong to this run, before anything is read. If the body
    raises, status.json gets the reason: `preempted` for `Stopped`, otherwise the cause of the failure. Disk failures
    are raised as `DiskError`.
    """
    folder = Path(config.run.dir)
    with ExitStack() as held:

        def hold() -> RunStatus:
            say = Progress().say

            def lock() -> None:
                held.enter_context(run_lock(folder))
                if config.run.mirror is None:
                    return
                mirror = Mirror(config.run.mirror, folder, say)
                if starts_over(config):
                    mirror.archive()
                elif (name := mirror.fetch(partial(refuse_changes, config))) is not None:
                    say(f"note: {name} is fetched from {config.run.mirror}")

            open_run(config, lock, say)
            write_inputs()
            return RunStatus(folder, main=True)  # here: it must not replace the failure that another rank writes next

        status = main_rank_first(hold) or RunStatus(folder, main=False)

        def tell(text: str) -> None:
            sys.stderr.write(f"{text}\n")
            status.write(reason=text)  # with the step, which is otherwise written every few seconds

        try:
            # Each rank watches itself: a hanging rank cannot be seen from outside
            held.enter_context(runtime.hang.watching(folder, runtime.rank, runtime.timeout_s, tell))
            yield status
        except Stopped as stopped:
            _stop(folder, runtime, f"signal to stop: {stopped}")
            raise
        except Exception as error:
            shown = _as_disk_error(error, folder) or error
            _end(folder, runtime, shown)
            # A disk that fails is a fault of the site: the user gets one line, not a traceback
            if shown is error:
                raise
            raise shown from None


def _stop(folder: Path, runtime: Runtime, reason: str) -> None:
    if runtime.is_main:
        end_status(folder, "preempted", reason)
        return
    # Before the first step a rank leaves by itself, and the main rank only sees that it is lost
    before = read_status(folder)
    if before.get("total_steps") is None or before["status"] == "done":
        with suppress(OSError):  # the rank's end is still a stop
            end_status(folder, "preempted", reason)


def _end(folder: Path, runtime: Runtime, error: Exception) -> None:
    """Write the failure to status.json: `fatal` if it needs a fix, `running` if a retry may succeed."""
    cause = cause_of(error)
    if cause.passing and not runtime.is_main:
        return
    rank = "" if runtime.is_main else f"rank {runtime.rank}: "
    with suppress(OSError):  # the disk may be what failed; the error itself is on the console
        status = "running" if cause.passing else "fatal"
        end_status(folder, status, f"{cause.name}: {rank}{type(error).__name__}: {reason_of(error, REASON)}")


def _as_disk_error(error: Exception, folder: Path) -> DiskError | None:
    if not isinstance(error, SafetensorError) and not (isinstance(error, OSError) and error.errno in REFUSED + AWAY):
        return None
    place, message, away = words_of_disk(error, folder)
    allowed = "a disk that can be read and written; then the same command resumes"
    return DiskError("run.dir", Said(message), allowed, place, away)


def train(
    config: Config, callbacks: Sequence[Callback] = (), write_inputs: Callable[[], None] = lambda: None
) -> TrainResult:
    """Train or resume a run. Returns at once if the run is done. All ranks call it.

    write_inputs: as in `open_session`. Raises `UserError` on all ranks for wrong input, and `Stopped` if a signal
    stopped the run; the run can be resumed.
    """
    refuse_accelerate(config, os.environ)
    with StopFlag().installed() as stop, distributed(stop=stop) as runtime:
        return result_of(config, train_on(config, runtime, callbacks, write_inputs), runtime)


def result_of(config: Config, metrics: dict[str, Any], runtime: Runtime) -> TrainResult:
    """How a run ended. metrics: of its last evaluation. Collective over the world."""
    folder = Path(config.run.dir)
    ended = from_main_rank(lambda: read_status(folder))
    newest = ended.get("checkpoint")
    return TrainResult(
        folder=folder,
        status=ended["status"],
        step=ended.get("step", 0),
        metrics={name: float(value) for name, value in metrics.items()},
        checkpoint=None if newest is None else folder / CHECKPOINTS / newest,
        reason=ended.get("reason"),
        rank=runtime.rank,
    )


def train_on(
    config: Config,
    runtime: Runtime,
    callbacks: Sequence[Callback] = (),
    write_inputs: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """`train` in an existing process group; returns the last evaluation's metrics."""
    agree(lambda: (None, config_facts(config)))  # before the run folder: its path is one of the facts
    groups = groups_of(config, runtime)  # before anything that may fail on only one rank
    turns = run_in_turns(config, runtime, groups, Shared(Path(config.run.dir)), callbacks, write_inputs)
    while True:
        try:
            next(turns)
        except StopIteration as ended:
            metrics: dict[str, Any] = ended.value
            return metrics


def run_in_turns(
    config: Config,
    runtime: Runtime,
    groups: Groups,
    shared: Shared,
    callbacks: Sequence[Callback] = (),
    write_inputs: Callable[[], None] = lambda: None,
) -> Generator[Trainer, None, dict[str, Any]]:
    """A run in turns: the first makes it ready, each later one takes a step. Returns the last evaluation's metrics."""
    stop = runtime.stop
    with open_session(config, runtime, write_inputs) as status:
        # Read the data, load the base. A signal ends this at once: there is no progress to save yet.
        with stop.interruptible():
            run = build_run(config, runtime, groups, shared)
        called = Callbacks(callbacks if runtime.is_main else (), run.folder, stop, run.schedule)
        try:
            # Agree on a stop once before the first long collective
            with stop.excusing_lost_ranks():
                stop.agreed(runtime.device)
            # Restore the checkpoint, or calibrate the heads and evaluate step 0. If no other rank waits, a signal may
            # end this at once.
            with stop.interruptible() if run.groups.world_size == 1 else nullcontext():
                place = begin(run)
            total = run.schedule.total_steps
            if place.step >= total and place.due is None:
                run.progress.say(f"already done: {total} steps in {run.folder}")
                # A kill may have come before the last status
                if runtime.is_main and read_status(run.folder)["status"] != "done":
                    MetricsFile(run.folder / METRICS, place.step).close()  # drops a truncated last line
                    status.at(place.step, total, run.schedule.at(place.step).stage.name)
                    status.write(status="done")
                return place.figures
            # The steps. The clock counts operations by the model as it is, adapters included
            trainer = Trainer(
                run,
                status,
                called,
                place,
                Clock(work_in(config, run.model).flops, runtime.device, run.groups.world_size, peak_of(runtime.device)),
                main_rank_first(lambda: open_log(run, place, called.step)),
            )
            status.at(place.step, total, run.schedule.at(place.step).stage.name)
            status.write(status="running")
            yield trainer
            return (yield from trainer.turns())
        finally:
            run.progress.close()


def peak_of(device: torch.device) -> float | None:
    """Peak in TFLOP/s of a known GPU; None for unknown GPUs and CPUs."""
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def work_in(config: Config, model: Any) -> Work:
    """The operation count of a run's `CausalQwenModel`, as the planner computes it."""
    abduction = sum(p.numel() for p in model.abduction.parameters() if p.ndim == 2)
    return Architecture.of(model.transformer.config.to_dict()).work(config, model.config.causal_size, abduction)
