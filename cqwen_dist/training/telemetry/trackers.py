"""Trackers: where rank 0 also sends metrics. A resumed run continues in them.

Steps between the checkpoint and the stop are computed again; W&B keeps their first values, TensorBoard their last.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cqwen_dist.config.errors import Said, UserError, reason_of
from cqwen_dist.config.schema import RunConfig
from cqwen_dist.run.files import TENSORBOARD, WANDB_ID, read_line, write_atomically
from cqwen_dist.training.telemetry.metrics import Tracker

PROJECT = "cqwen"  # if WANDB_PROJECT names none


def open_trackers(run_dir: Path, run: RunConfig, config: dict[str, Any], step: int) -> list[Tracker]:
    """The run's trackers. step: of the checkpoint to resume from. Raises `UserError` by key if one cannot be used."""
    trackers: list[Tracker] = [] if run.wandb == "disabled" else [WandbTracker(run_dir, run, config)]
    return [*trackers, TensorBoardTracker(run_dir, step)] if run.tensorboard else trackers


def _run_id(run_dir: Path) -> str:
    """The run's id in W&B, made at its first start, or if the file has no plain name."""
    path = run_dir / WANDB_ID
    if not re.fullmatch(r"[\w-]{1,64}", read_line(path), re.ASCII):
        write_atomically(path, secrets.token_hex(4))
    return read_line(path)


class WandbTracker:
    """Weights & Biases, online or offline. A resumed run continues under the id in its folder."""

    def __init__(self, run_dir: Path, run: RunConfig, config: dict[str, Any]) -> None:
        """Raises `UserError` if W&B cannot be reached or does not know the user."""
        import wandb

        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run.name or run_dir.name,
                id=_run_id(run_dir),
                resume="allow",
                mode=run.wandb,
                dir=str(run_dir),
                config=config,
            )
        except wandb.errors.Error as error:
            found = Said(f"{run.wandb} ({reason_of(error)})")
            raise UserError("run.wandb", found, "a W&B login, or offline, or disabled") from None

    def write(self, record: Mapping[str, Any]) -> None:
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
        folder = run_dir / TENSORBOARD
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
