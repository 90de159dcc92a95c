"""Where figures go: metrics.jsonl (one object an optimizer step), W&B, the console.

Training figures stay tensors until the next step has been started, so no step waits for its own loss.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from cqwen_dist.checkpoint.manifest import write_atomically
from cqwen_dist.config import RunConfig

METRICS = "metrics.jsonl"


class MetricsFile:
    """metrics.jsonl: one flushed line an optimizer step, each step once, also after a resume."""

    def __init__(self, path: Path, step: int) -> None:
        """Opens for appending; lines of steps after `step` (done after the checkpoint, now done again) are dropped."""
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if 0 < _step_of(line) <= step]
            write_atomically(path, "".join(line + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _step_of(line: str) -> int:
    """The step of a line; 0 where a kill cut it off."""
    try:
        record = json.loads(line)
    except ValueError:
        return 0
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else 0


class MetricsLog:
    """Rank 0's sinks. `push` takes a step's figures, tensors among them; they are read when the next step's come."""

    def __init__(self, run_dir: Path, run: RunConfig, config: dict[str, Any], step: int) -> None:
        self._file = MetricsFile(run_dir / METRICS, step)
        self._pending: dict[str, Any] | None = None
        self._wandb: Any = None
        if run.wandb != "disabled":
            import wandb

            name = run.name or run_dir.name
            id_file = run_dir / "wandb_id"
            if not id_file.is_file():
                write_atomically(id_file, secrets.token_hex(4))
            self._wandb = wandb.init(
                project=run.wandb_project,
                name=name,
                id=id_file.read_text(encoding="utf-8").strip(),
                resume="allow",
                mode=run.wandb,
                dir=str(run_dir),
                config=config,
            )

    def push(self, record: dict[str, Any]) -> None:
        """Queue one step's record; writes the one before it."""
        self.flush()
        self._pending = record

    def add(self, figures: Mapping[str, Any]) -> None:
        """Add figures (an evaluation's) to the step last pushed."""
        assert self._pending is not None
        self._pending.update(figures)

    def flush(self) -> dict[str, Any] | None:
        """Write what is queued."""
        if self._pending is None:
            return None
        record = {k: float(v) if isinstance(v, Tensor) else v for k, v in self._pending.items()}
        self._pending = None
        self._file.write(record)
        if self._wandb is not None:
            self._wandb.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])
        return record

    def close(self) -> None:
        self.flush()
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()


class Progress:
    """The console line of rank 0: where the run is, how fast, how long still."""

    def __init__(self, total_steps: int, start_step: int, every_s: float = 5.0) -> None:
        self.console = Console(highlight=False)
        self.total, self.start, self.every_s = total_steps, start_step, every_s
        self._began = self._shown = time.monotonic()
        self._tokens = 0

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
            self.say(f"[bold]{stage}[/] step {step}/{self.total}{shown}  {rate:,.0f} tokens/s  {_duration(left)} left")
        return rate

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s"
