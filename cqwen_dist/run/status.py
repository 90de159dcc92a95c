"""status.json: a run's state, for people, `cqwen status` and launchers (no torch)."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any, TypedDict

from cqwen_dist.run.files import CONFIG, STATUS, is_number, read_object, write_atomically

_FINAL = {"preempted": 1, "fatal": 2}  # a status that only one as large replaces
BEAT_S = 10.0  # seconds between writes while only the step changes


class Status(TypedDict, total=False):
    """Content of status.json; `status` is always present."""

    status: str  # running (also after a kill) | done | paused | preempted (orderly stop) | fatal (needs a fix first)
    step: int
    total_steps: int | None
    stage: str | None
    seconds: float  # working time over all starts
    eta_s: float | None  # estimated time left
    checkpoint: str | None  # newest checkpoint's name
    mirrored: str  # the newest checkpoint in the store of `run.mirror`, or none; not here without one
    restarts: int  # number of resumptions
    reason: str | None  # for preempted, fatal, and temporary failures (a lost rank)
    host: str  # rank 0's host and pid
    pid: int
    updated: float  # unix time


_NUMBERS = ("step", "total_steps", "seconds", "eta_s", "restarts", "pid", "updated")


def run_in(folder: Path) -> Path:
    """The folder itself, or the run in the folder of a `cqwen fit`."""
    run = folder / "run"
    return run if (run / CONFIG).is_file() and not (folder / CONFIG).is_file() else folder


def write_status(run_dir: Path, status: str, **details: Any) -> None:
    """Replace status.json atomically."""
    write_atomically(run_dir / STATUS, json.dumps({"status": status, **details, "updated": round(time.time(), 3)}))


def read_status(run_dir: Path) -> Status:
    """The last written status, without values of a wrong type; {"status": "unknown"} if there is none."""
    found: Any = read_object(run_dir / STATUS)
    for key, value in list(found.items()):
        if value is not None and not (is_number(value) if key in _NUMBERS else isinstance(value, str)):
            del found[key]
    return found if found.get("status") else {"status": "unknown"}


def end_status(run_dir: Path, status: str, reason: str) -> None:
    """Write how an unfinished run ended; other fields stay. Any rank may write, and `_FINAL` decides which stays."""
    before = read_status(run_dir)
    if _FINAL.get(status, 0) >= _FINAL.get(before["status"], 0):
        ended: dict[str, Any] = {**before, "status": status, "reason": reason, "eta_s": None}
        write_status(run_dir, **ended)


class RunStatus:
    """Writes this process's run status. Only the main rank writes."""

    def __init__(self, run_dir: Path, main: bool) -> None:
        self._run_dir, self._main = run_dir, main
        before = read_status(run_dir)
        self._worked = before.get("seconds", 0.0)  # in earlier starts
        self._began = self._written = time.monotonic()
        self._fields: dict[str, Any] = {
            "status": "running",
            "step": before.get("step", 0),
            "total_steps": None,
            "stage": None,
            "seconds": self._worked,
            "eta_s": None,
            "checkpoint": before.get("checkpoint"),
            "restarts": before.get("restarts", 0) + (before["status"] != "unknown"),
            "reason": None,
            "host": platform.node(),
            "pid": os.getpid(),
        }
        if "mirrored" in before:
            self._fields["mirrored"] = before["mirrored"]
        # A finished run keeps its last status until it really trains on
        if before["status"] != "done":
            self.write()

    def at(
        self, step: int, total_steps: int, stage: str | None, checkpoint: str | None = None, eta_s: float | None = None
    ) -> None:
        """Note the run's position. The file is written every few seconds."""
        self._fields.update(step=step, total_steps=total_steps, stage=stage, eta_s=eta_s and round(eta_s, 1))
        if checkpoint not in (None, self._fields["checkpoint"]):
            self.write(checkpoint=checkpoint)
        elif time.monotonic() - self._written > BEAT_S:
            self.write()

    def mirrored(self, name: str | None) -> None:
        """Write the last checkpoint that was uploaded. None: an upload has failed."""
        self.write(mirrored=name or self._fields.get("mirrored", "none"))

    def write(self, **fields: Any) -> None:
        """Write now with these fields changed. checkpoint=None keeps the last one."""
        if not self._main:
            return
        if fields.get("checkpoint", "") is None:
            del fields["checkpoint"]
        self._written = time.monotonic()
        self._fields.update(fields, seconds=round(self._worked + self._written - self._began, 1))
        write_status(self._run_dir, **self._fields)
