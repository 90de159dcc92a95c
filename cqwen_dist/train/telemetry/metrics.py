"""The figures of a run on rank 0: read late, watched, handed to the sinks, and the console line.

A step's figures stay tensors until the next step has been started: they are packed into one vector, copied while the
device works, and read when the next step's come. So no step waits for its own loss, and a step costs one copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from cqwen_dist.config import RunConfig
from cqwen_dist.run.files import ALARMS
from cqwen_dist.train.telemetry.alarms import Alarm, Alarms
from cqwen_dist.train.telemetry.writers import MetricsFile, open_sinks

# The names of seed S1 (6.1) beside those of S3 (5), which they are aliases of.
ALIASES = {
    "total_loss": "train/total_loss",
    "ovr_prob_sum": "train/prob_sum_mean",
    "units_mean_loc": "dist/U_loc_mean",
    "units_mean_scale": "dist/U_scale_mean",
}
_STYLES = {r"^note:": "yellow", r"^alarm\b": "bold red", r"^.* step \d+/\d+": "bold"}


class _Late:
    """Scalars of a device on their way to the host."""

    def __init__(self, figures: Mapping[str, Any]) -> None:
        self._names = [name for name, value in figures.items() if isinstance(value, Tensor)]
        self._there: Tensor | None = None
        self._arrived: Any = None
        if self._names:
            packed = torch.stack([figures[name].detach().float() for name in self._names])
            self._there = packed
            if packed.is_cuda:
                self._there = torch.empty(packed.shape, pin_memory=True).copy_(packed, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def read(self) -> dict[str, float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return {} if self._there is None else dict(zip(self._names, self._there.tolist(), strict=True))


class MetricsLog:
    """Rank 0's sinks. `push` takes a step's figures, tensors among them; they are read when the next step's come."""

    def __init__(
        self,
        run_dir: Path,
        run: RunConfig,
        config: dict[str, Any],
        step: int,
        alarms: Alarms | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """step: of the checkpoint that is gone on from; config: shown in W&B; say: where alarms are told."""
        self._sinks = open_sinks(run_dir, run, config, step)
        self._alarm_file = MetricsFile(run_dir / ALARMS, step)
        self._alarms, self._say = alarms, say
        self._pending: dict[str, Any] | None = None
        self._late = _Late({})
        self._samples: Sequence[int] = ()

    def push(self, record: dict[str, Any], samples: Sequence[int] = ()) -> None:
        """Queue one step's record; writes the one before it. samples: of the step, to be named in an alarm."""
        self.flush()
        self._pending, self._late, self._samples = record, _Late(record), samples

    def add(self, figures: Mapping[str, Any]) -> None:
        """Add plain figures (an evaluation's) to the step last pushed."""
        assert self._pending is not None
        self._pending.update(figures)

    def alarm(self, alarm: Alarm) -> None:
        """Tell of it wherever figures go."""
        self._alarm_file.write(alarm.to_dict())
        for sink in self._sinks:
            sink.alarm(alarm.kind, alarm.text)
        if self._say is not None:
            self._say(f"alarm {alarm.kind}: {alarm.text}")

    def flush(self) -> dict[str, Any] | None:
        """Write what is queued."""
        if self._pending is None:
            return None
        record = {**self._pending, **self._late.read()}
        self._pending = None
        record.update({alias: record[name] for alias, name in ALIASES.items() if name in record})
        for sink in self._sinks:
            sink.write(record)
        for alarm in () if self._alarms is None else self._alarms.look(record, self._samples):
            self.alarm(alarm)
        return record

    def close(self) -> None:
        self.flush()
        self._alarm_file.close()
        for sink in self._sinks:
            sink.close()


class Progress:
    """The console line of rank 0: where the run is, how fast, how long still."""

    def __init__(self, total_steps: int, start_step: int, every_s: float = 5.0) -> None:
        self.console = Console(highlight=False, markup=False, emoji=False)
        self.total, self.start, self.every_s = total_steps, start_step, every_s
        self._began = self._shown = time.monotonic()
        self._tokens = 0
        self._part, self._part_began = "", self._began

    def step(self, step: int, stage: str, tokens: int, loss: float | None, force: bool = False) -> float:
        """Count a finished step; prints at most every few seconds. Returns tokens/s over the run so far."""
        now = time.monotonic()
        self._tokens += tokens
        elapsed = max(now - self._began, 1e-9)
        rate = self._tokens / elapsed
        if force or now - self._shown >= self.every_s:
            self._shown = now
            done = step - self.start
            left = (self.total - step) * elapsed / max(done, 1)
            shown = "" if loss is None else f"  loss {loss:.4f}"
            self.say(f"{stage} step {step}/{self.total}{shown}  {rate:,.0f} tokens/s  {_duration(left)} left")
        return rate

    def part(self, what: str, done: int, of: int) -> None:
        """How far one part of the work is, with the time left of it; printed at most every few seconds."""
        now = time.monotonic()
        if what != self._part or not done:  # the same part may come again
            self._part, self._part_began = what, now
        if now - self._shown >= self.every_s:
            self._shown = now
            left = f"  {_duration((of - done) * (now - self._part_began) / done)} left" if 0 < done < of else ""
            self.say(f"  {what}" + (f" {done}/{of}" if of > 1 else "") + left)

    def say(self, text: str) -> None:
        """A line as it is: names may hold square brackets, so what is to stand out does by how a line begins."""
        line = Text(text)
        for start, style in _STYLES.items():
            line.highlight_regex(start, style)
        self.console.print(line, soft_wrap=True)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s"
