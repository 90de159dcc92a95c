"""One training command from start to end: opens the run, builds it, starts or resumes it, and trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from cqwen_dist.config.schema import Config
from cqwen_dist.parallel.agreement import agree
from cqwen_dist.parallel.collectives import from_main_rank, main_rank_first
from cqwen_dist.parallel.runtime import Runtime, distributed
from cqwen_dist.parallel.stop import StopFlag
from cqwen_dist.run.files import CHECKPOINTS, METRICS
from cqwen_dist.run.status import read_status
from cqwen_dist.sizes.architecture import Architecture
from cqwen_dist.sizes.flops import Work, peak_tflops
from cqwen_dist.training.assembly import build_run, groups_of
from cqwen_dist.training.callbacks import Callback, Callbacks, TrainResult
from cqwen_dist.training.inputs import config_facts
from cqwen_dist.training.session import open_session
from cqwen_dist.training.start import begin, open_log
from cqwen_dist.training.telemetry.metrics import MetricsFile
from cqwen_dist.training.telemetry.perf import Clock
from cqwen_dist.training.trainer import Trainer


def train(
    config: Config, callbacks: Sequence[Callback] = (), write_inputs: Callable[[], None] = lambda: None
) -> TrainResult:
    """Train or resume a run. Returns at once if the run is done. All ranks call it.

    write_inputs: as in `open_session`. Raises `UserError` on all ranks for wrong input, and `Stopped` if a signal
    stopped the run; the run can be resumed.
    """
    with StopFlag().installed() as stop, distributed(stop=stop) as runtime:
        metrics = train_on(config, runtime, callbacks, write_inputs)
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
    stop = runtime.stop
    agree(lambda: (None, config_facts(config)))  # before the run folder: its path is one of the facts
    groups = groups_of(config, runtime)  # before anything that may fail on only one rank
    with open_session(config, runtime, write_inputs) as status:
        # Read the data, load the base. A signal ends this at once: there is no progress to save yet.
        with stop.interruptible():
            run = build_run(config, runtime, groups)
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
            return trainer.train()
        finally:
            run.progress.close()


def peak_of(device: torch.device) -> float | None:
    """Peak in TFLOP/s of a known GPU; None for unknown GPUs and CPUs."""
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def work_in(config: Config, model: Any) -> Work:
    """The operation count of a run's `CausalQwenModel`, as the planner computes it."""
    abduction = sum(p.numel() for p in model.abduction.parameters() if p.ndim == 2)
    return Architecture.of(model.transformer.config.to_dict()).work(config, model.config.causal_size, abduction)
