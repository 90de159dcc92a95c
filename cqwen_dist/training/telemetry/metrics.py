"""The metrics of a run on rank 0: checked for alarms, and written to a JSONL file and the run's trackers.

The metrics of a step are read after the next step has started. In the meantime one tensor with all values is copied
while the device works: no step waits for its loss.

A record has the plain values of one optimizer step: `step`, `stage`, `train/...`, and if due `eval/...`, `dist/...`,
`perf/...`. The record of step 0 is the evaluation of the start (S1 6.1). After a resume all writers continue; replayed
steps are not written twice.
"""

import json
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.config.errors import Said, UserError, reason_of
from cqwen_dist.config.training import RunConfig
from cqwen_dist.run import files
from cqwen_dist.run.files import not_followed, read_line, read_lines, write_atomically
from cqwen_dist.training.telemetry.alarms import Alarm, Alarms

PROJECT = "cqwen"  # if WANDB_PROJECT names none


def open_trackers(run_dir: Path, run: RunConfig, config: dict[str, Any], step: int) -> list["Tracker"]:
    """The run's trackers. step: of the checkpoint to resume from. Raises `UserError` by key if one cannot be used.

    Steps between the checkpoint and the stop are computed again; W&B keeps their first values, TensorBoard their last.
    """
    trackers: list[Tracker] = [] if run.wandb == "disabled" else [WandbTracker(run_dir, run, config)]
    return [*trackers, TensorBoardTracker(run_dir, step)] if run.tensorboard else trackers


class WandbTracker:
    """Weights & Biases, online or offline. A resumed run continues under the id in its folder."""

    def __init__(self, run_dir: Path, run: RunConfig, config: dict[str, Any]) -> None:
        """Raises `UserError` if W&B cannot be reached or does not know the user."""
        import wandb

        # The run's id is made at its first start, or if the file has no plain name
        if not re.fullmatch(r"[\w-]{1,64}", read_line(run_dir / files.WANDB_ID), re.ASCII):
            write_atomically(run_dir / files.WANDB_ID, secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run.name or run_dir.name,
                id=read_line(run_dir / files.WANDB_ID),
                resume="allow",
                mode=run.wandb,
                dir=str(run_dir),
                config=config,
            )
        except wandb.errors.Error as error:
            found = Said(f"{run.wandb} ({reason_of(error)})")
            raise UserError("run.wandb", found, "a W&B login, or offline, or disabled") from None

    def write(self, record: Mapping[str, Any]) -> None:
        """The plain values of a step, `step` and `stage` among them."""
        self._run.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])

    def alarm(self, title: str, text: str) -> None:
        self._run.alert(title, text)

    def close(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """Event files in RUN/tensorboard, for `tensorboard --logdir`. Events after the checkpoint's step are purged."""

    def __init__(self, run_dir: Path, step: int) -> None:
        """Raises `UserError` without its package."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("run.tensorboard", True, "false, or pip install 'cqwen-dist[tensorboard]'") from None
        folder = run_dir / files.TENSORBOARD
        purge_step = (step + 1 if step else 0) if folder.is_dir() else None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, record["step"])

    def alarm(self, title: str, text: str) -> None:
        self._writer.add_text(f"alarm/{title}", text)

    def close(self) -> None:
        self._writer.close()


Tracker = WandbTracker | TensorBoardTracker


# Names in seed S1 (6.1) for metrics of S3 (5).
ALIASES = {
    "total_loss": "train/total_loss",
    "ovr_prob_sum": "train/prob_sum_mean",
    "units_mean_loc": "dist/U_loc_mean",
    "units_mean_scale": "dist/U_scale_mean",
}


class MetricsFile:
    """A JSONL file with one flushed line per optimizer step; each step occurs once, also after a resume."""

    def __init__(self, path: Path, step: int) -> None:
        """Open for appending. Drops lines after `step`, the step of the checkpoint, as these steps are repeated. At
        step 0 this drops all lines: the start is written again too."""
        if path.is_file():
            found = [record for record in read_lines(path) if isinstance(record.get("step"), int)]
            kept = [record for record in found if step and record["step"] <= step]
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = open(path, "a", encoding="utf-8", opener=not_followed)  # noqa: SIM115 (kept open)

    def write(self, record: Mapping[str, Any]) -> None:
        # JSON has neither infinity nor NaN
        odd = {name: None for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
        self._file.write(json.dumps({**record, **odd}) + "\n")
        self._file.flush()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def _copying(record: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Start copying the tensors of a record to the host. Returns a function that waits and returns plain values."""
    # One packed copy in pinned memory: an asynchronous copy per metric would cost one launch each
    names = [name for name, value in record.items() if isinstance(value, Tensor)]
    packed = torch.stack([record[name].detach().float() for name in names]) if names else torch.zeros(0)
    arrived = None
    if packed.is_cuda:
        packed = torch.empty(packed.shape, pin_memory=True).copy_(packed, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

    def plain() -> dict[str, Any]:
        if arrived is not None:
            arrived.synchronize()
        return {**record, **dict(zip(names, packed.tolist(), strict=True))}

    return plain


class MetricsLog:
    """The writers of rank 0. `push` takes the metrics of a step, as tensors, and writes the previous step."""

    def __init__(
        self,
        run_dir: Path,
        step: int,
        alarms: Alarms | None = None,
        say: Callable[[str], None] = lambda text: None,
        on_record: Callable[[Mapping[str, Any]], None] = lambda record: None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """step: step of the checkpoint to resume from. say: prints alarms. on_record: called with each record."""
        self._file, self._alarm_file = (MetricsFile(run_dir / name, step) for name in (files.METRICS, files.ALARMS))
        self._trackers, self._alarms, self._say, self._on_record = trackers, alarms, say, on_record
        self._record: dict[str, Any] = {}
        self._pending: Callable[[], dict[str, Any]] | None = None
        self._samples: Sequence[int] = ()

    def start(self, stage: str, metrics: Mapping[str, Any]) -> None:
        """Write the evaluation of the start as the record of step 0. stage: the first one."""
        self._write({"step": 0, "stage": stage, **metrics})

    def push(self, record: dict[str, Any], samples: Sequence[int] = ()) -> dict[str, Any] | None:
        """Queue the record of a step; write and return the previous one. samples: samples of the step, for alarms."""
        before = self.flush()
        self._record, self._pending, self._samples = record, _copying(record), samples
        return before

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add plain numbers (of an evaluation) to the last pushed step."""
        self._record.update(metrics)

    def alarm(self, alarm: Alarm) -> None:
        """Send an alarm to its file, all trackers and the console."""
        self._alarm_file.write(asdict(alarm))
        for tracker in self._trackers:
            tracker.alarm(alarm.kind, alarm.text)
        self._say(f"alarm {alarm.kind}: {alarm.text}")

    def flush(self) -> dict[str, Any] | None:
        """Write the queued record and return it."""
        if self._pending is None:
            return None
        record, self._pending = self._pending(), None
        self._write(record)
        self._on_record(record)
        for alarm in () if self._alarms is None else self._alarms.look(record, self._samples):
            self.alarm(alarm)
        return record

    def _write(self, record: dict[str, Any]) -> None:
        record.update({alias: record[name] for alias, name in ALIASES.items() if name in record})
        for each in (self._file, *self._trackers):
            each.write(record)

    def close(self) -> None:
        self.flush()
        for each in (self._alarm_file, self._file, *self._trackers):
            each.close()
