"""Trackers: where rank 0 also sends metrics. Each has `Tracker`'s methods; a new one is a class and a name in TRACKERS.

A resumed run continues in each. Steps between the checkpoint and the stop are computed again; W&B, MLflow and Trackio
keep their first values, TensorBoard their last.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cqwen_dist.config.errors import Said, UserError, reason_of
from cqwen_dist.config.schema import RunConfig
from cqwen_dist.config.yaml_text import leaves
from cqwen_dist.run.files import TENSORBOARD, WANDB_ID, read_line, write_atomically
from cqwen_dist.training.telemetry.metrics import Tracker

PROJECT = "cqwen"  # if the tracker's variable names none


def open_trackers(run_dir: Path, run: RunConfig, config: dict[str, Any], step: int, written: int) -> list[Tracker]:
    """The run's trackers, each of which raises `UserError` by key if its package or service is missing.

    step: step of the checkpoint to resume from. written: last step that was sent before, or -1.
    """
    trackers: list[Tracker] = [WandbTracker(run_dir, run, config)] if run.wandb != "disabled" else []
    flat = {key: value for key, value in leaves(config) if value != {}}
    for name in run.trackers:
        try:
            trackers.append(TRACKERS[name](run_dir, run, flat, step, written))
        except ImportError as error:
            allowed = f"no {name}, or its packages ({error}): pip install 'cqwen-dist[{name}]'"
            raise UserError("run.trackers", name, allowed) from None
    return trackers


def _run_id(run_dir: Path) -> str:
    """The run's id in all services, made at its first start, or if the file has no plain name."""
    path = run_dir / WANDB_ID
    if not re.fullmatch(r"[\w-]{1,64}", read_line(path), re.ASCII):
        write_atomically(path, secrets.token_hex(4))
    return read_line(path)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """A record's finite numbers, without its step: services treat NaN differently."""
    numbers = {name: value for name, value in record.items() if name != "step" and isinstance(value, (int, float))}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


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

    def __init__(self, run_dir: Path, run: RunConfig, config: dict[str, Any], step: int, written: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

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


class MlflowTracker:
    """MLflow at MLFLOW_TRACKING_URI, by default a file RUN/mlflow.db. The config's keys are the run's parameters."""

    def __init__(self, run_dir: Path, run: RunConfig, config: dict[str, Any], step: int, written: int) -> None:
        import mlflow

        self._mlflow, self._written = mlflow, written
        mine = {"cqwen.run": _run_id(run_dir)}
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{(run_dir / 'mlflow.db').resolve()}")
        try:
            place = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
            tagged = f"tags.`cqwen.run` = '{mine['cqwen.run']}'"
            found = mlflow.MlflowClient().search_runs([place.experiment_id], tagged, max_results=1)
            mlflow.start_run(found[0].info.run_id if found else None, run_name=run.name or run_dir.name, tags=mine)
            if not found:
                flat = [(key, str(value)[:6000]) for key, value in config.items()]
                for at in range(0, len(flat), 100):  # both are MLflow's limits
                    mlflow.log_params(dict(flat[at : at + 100]))
        except mlflow.MlflowException as error:
            found = Said(f"mlflow ({reason_of(error)})")
            raise UserError("run.trackers", found, "MLFLOW_TRACKING_URI of a server that answers") from None

    def write(self, record: Mapping[str, Any]) -> None:
        if record["step"] > self._written:  # in the background: no step waits for the server
            self._mlflow.log_metrics(_numbers(record), step=record["step"], synchronous=False)

    def alarm(self, title: str, text: str) -> None:
        self._mlflow.set_tag(f"alarm.{title}", text)

    def close(self) -> None:
        self._mlflow.flush_async_logging()
        self._mlflow.end_run()


class TrackioTracker:
    """Trackio, in TRACKIO_DIR of this machine or in the Space that TRACKIO_SPACE_ID names."""

    def __init__(self, run_dir: Path, run: RunConfig, config: dict[str, Any], step: int, written: int) -> None:
        import trackio

        self._trackio, self._written = trackio, written
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name or run_dir.name}-{_run_id(run_dir)}",  # Trackio knows a run by its name
            config=config,
            resume="allow",
            embed=False,
        )

    def write(self, record: Mapping[str, Any]) -> None:
        if record["step"] > self._written:
            self._run.log(_numbers(record), step=record["step"])

    def alarm(self, title: str, text: str) -> None:
        self._trackio.alert(title, text)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, RunConfig, dict[str, Any], int, int], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
