"""Writers of a run's metrics: a JSONL file, W&B, TensorBoard. Only rank 0 has them.

A record is one optimizer step's plain values: `step`, `stage`, `train/...`, and where due `eval/...`, `dist/...`,
`perf/...`. After a resume every writer continues; steps that are taken again are not written twice.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cqwen_dist.config import RunConfig, UserError
from cqwen_dist.config.errors import Said
from cqwen_dist.run.files import WANDB_ID, write_atomically


class Writer:
    """Takes metrics; what a subclass does not override is ignored."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one step's record."""

    def alarm(self, title: str, text: str) -> None:
        """Alert people."""

    def close(self) -> None:
        """End writing; everything written is durable."""


class MetricsFile(Writer):
    """A JSONL file: one flushed line per optimizer step, each step once, also after a resume."""

    def __init__(self, path: Path, step: int) -> None:
        """Open for appending; drops lines of steps after `step`, the checkpoint's: these steps are taken again."""
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if 0 < _step_of(line) <= step]
            write_atomically(path, "".join(line + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({name: _plain(value) for name, value in record.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _plain(value: Any) -> Any:
    """null for infinity and NaN, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> int:
    """The step of a line; 0 where a kill cut it off."""
    try:
        record = json.loads(line)
    except ValueError:
        return 0
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else 0


class WandbWriter(Writer):
    """Weights & Biases, online or offline; a resumed run continues under the id in its folder."""

    def __init__(self, run_dir: Path, run: RunConfig, config: dict[str, Any]) -> None:
        """Raises `UserError` where W&B cannot be reached or does not know the user."""
        import wandb

        id_file = run_dir / WANDB_ID
        if not id_file.is_file():
            write_atomically(id_file, secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=run.wandb_project,
                name=run.name or run_dir.name,
                id=id_file.read_text(encoding="utf-8").strip(),
                resume="allow",
                mode=run.wandb,
                dir=str(run_dir),
                config=config,
            )
        except wandb.errors.Error as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                "run.wandb", Said(f"{run.wandb} ({reason})"), "a W&B login, or offline, or disabled"
            ) from None

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])

    def alarm(self, title: str, text: str) -> None:
        self._run.alert(title, text)

    def close(self) -> None:
        self._run.finish()


class TensorBoardWriter(Writer):
    """Event files in RUN/tensorboard, for `tensorboard --logdir`."""

    def __init__(self, folder: Path, step: int) -> None:
        """Events of steps after `step` are purged. Raises `UserError` where the package is missing."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "run.tensorboard", True, "false, or the package: pip install 'cqwen-dist[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if folder.is_dir() else None)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, record["step"])

    def alarm(self, title: str, text: str) -> None:
        self._writer.add_text(f"alarm/{title}", text)

    def close(self) -> None:
        self._writer.close()
