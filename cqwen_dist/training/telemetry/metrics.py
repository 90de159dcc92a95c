"""The metrics of a run on rank 0: read late, checked for alarms, and given to the writers.

A step's metrics are read when the next step has begun. Until then they are tensors, packed into one vector, which is
copied while the device works. So no step waits for its own loss, and each step costs one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.config import RunConfig
from cqwen_dist.run.files import ALARMS, METRICS, TENSORBOARD
from cqwen_dist.training.telemetry.alarms import Alarm, Alarms
from cqwen_dist.training.telemetry.writers import MetricsFile, TensorBoardWriter, WandbWriter, Writer

# The names of seed S1 (6.1) for metrics of S3 (5).
ALIASES = {
    "total_loss": "train/total_loss",
    "ovr_prob_sum": "train/prob_sum_mean",
    "units_mean_loc": "dist/U_loc_mean",
    "units_mean_scale": "dist/U_scale_mean",
}


class _Late:
    """Scalars on their way from the device to the host."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._names = [name for name, value in metrics.items() if isinstance(value, Tensor)]
        self._on_host: Tensor | None = None
        self._arrived: Any = None
        if self._names:
            packed = torch.stack([metrics[name].detach().float() for name in self._names])
            self._on_host = packed
            if packed.is_cuda:
                self._on_host = torch.empty(packed.shape, pin_memory=True).copy_(packed, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def read(self) -> dict[str, float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return {} if self._on_host is None else dict(zip(self._names, self._on_host.tolist(), strict=True))


class MetricsLog:
    """Rank 0's writers. `push` takes a step's metrics, tensors among them, and writes those of the step before."""

    def __init__(
        self,
        run_dir: Path,
        run: RunConfig,
        config: dict[str, Any],
        step: int,
        alarms: Alarms | None = None,
        say: Callable[[str], None] | None = None,
        further: Sequence[Writer] = (),
    ) -> None:
        """step: of the checkpoint to resume from. config: shown in W&B. say: prints alarms. further: more writers.

        metrics.jsonl is always written, W&B and TensorBoard if `run` says so.
        """
        self._writers: list[Writer] = [MetricsFile(run_dir / METRICS, step)]
        if run.wandb != "disabled":
            self._writers.append(WandbWriter(run_dir, run, config))
        if run.tensorboard:
            self._writers.append(TensorBoardWriter(run_dir / TENSORBOARD, step))
        self._writers += further
        self._alarm_file = MetricsFile(run_dir / ALARMS, step)
        self._alarms, self._say = alarms, say
        self._pending: dict[str, Any] | None = None
        self._late = _Late({})
        self._samples: Sequence[int] = ()

    def push(self, record: dict[str, Any], samples: Sequence[int] = ()) -> dict[str, Any] | None:
        """Queue one step's record; writes and returns the record before it. samples: of the step, for an alarm."""
        before = self.flush()
        self._pending, self._late, self._samples = record, _Late(record), samples
        return before

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add plain numbers (an evaluation's) to the step last pushed."""
        assert self._pending is not None
        self._pending.update(metrics)

    def alarm(self, alarm: Alarm) -> None:
        """Send an alarm to every writer and the console."""
        self._alarm_file.write(asdict(alarm))
        for writer in self._writers:
            writer.alarm(alarm.kind, alarm.text)
        if self._say is not None:
            self._say(f"alarm {alarm.kind}: {alarm.text}")

    def flush(self) -> dict[str, Any] | None:
        """Write what is queued."""
        if self._pending is None:
            return None
        record = {**self._pending, **self._late.read()}
        self._pending = None
        record.update({alias: record[name] for alias, name in ALIASES.items() if name in record})
        for writer in self._writers:
            writer.write(record)
        for alarm in () if self._alarms is None else self._alarms.look(record, self._samples):
            self.alarm(alarm)
        return record

    def close(self) -> None:
        self.flush()
        self._alarm_file.close()
        for writer in self._writers:
            writer.close()
