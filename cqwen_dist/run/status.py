"""status.json: what a run is doing, for people, `cqwen status` and launchers (no torch)."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any, TypedDict

from cqwen_dist.run.files import STATUS, read_object, write_atomically

BEAT_S = 10.0  # between two writes while only the step changes


class Status(TypedDict, total=False):
    """The content of status.json; `status` is always in it."""

    status: str  # running (also after a kill) | done | paused | preempted: stopped in order | fatal: needs a fix first
    step: int
    total_steps: int | None
    stage: str | None
    seconds: float  # of work, over all starts
    eta_s: float | None  # left
    checkpoint: str | None  # the newest's name
    restarts: int  # how often the run was resumed
    reason: str | None  # of preempted, of fatal, and of a failure that may pass (a lost rank)
    host: str  # of rank 0, as is pid
    pid: int
    updated: float  # unix time


def write_status(run_dir: Path, status: str, **details: Any) -> None:
    """Replace status.json, atomically."""
    write_atomically(run_dir / STATUS, json.dumps({"status": status, **details, "updated": round(time.time(), 3)}))


def read_status(run_dir: Path) -> Status:
    """The last status written; {"status": "unknown"} without one."""
    found: Any = read_object(run_dir / STATUS)
    return found if "status" in found else {"status": "unknown"}


def end_status(run_dir: Path, status: str, reason: str) -> None:
    """Write how a run that is not done ended; other fields stay. Any rank may write `fatal`, which nothing replaces."""
    before = read_status(run_dir)
    if before["status"] != "fatal" or status == "fatal":
        ended: dict[str, Any] = {**before, "status": status, "reason": reason, "eta_s": None}
        write_status(run_dir, **ended)


class RunStatus:
    """Writes the status of the run that this process works on; does nothing unless on the main rank."""

    def __init__(self, run_dir: Path, main: bool) -> None:
        self._run_dir, self._main = run_dir, main
        before = read_status(run_dir)
        known = before["status"] != "unknown"
        self._worked = before.get("seconds", 0.0)  # before this start
        self._began = self._written = time.monotonic()
        self._first_step: int | None = None
        self._fields: dict[str, Any] = {
            "status": "running",
            "step": 0,
            "total_steps": None,
            "stage": None,
            "seconds": self._worked,
            "eta_s": None,
            "checkpoint": before.get("checkpoint"),
            "restarts": before.get("restarts", 0) + known,
            "reason": None,
            "host": platform.node(),
            "pid": os.getpid(),
        }
        if before["status"] != "done":
            self.write()

    def at(self, step: int, total_steps: int, stage: str | None, checkpoint: str | None = None) -> None:
        """Note where the run is; the file is written every few seconds."""
        if not self._main:
            return
        now = time.monotonic()
        if self._first_step is None:
            self._first_step, self._began_steps = step, now
        done = step - self._first_step
        eta = round((total_steps - step) * (now - self._began_steps) / done, 1) if done else None
        self._fields.update(step=step, total_steps=total_steps, stage=stage, eta_s=eta)
        if checkpoint not in (None, self._fields["checkpoint"]):
            self.write(checkpoint=checkpoint)
        elif now - self._written > BEAT_S:
            self.write()

    def write(self, **fields: Any) -> None:
        """Write now, with these fields changed; a checkpoint of None keeps the last one."""
        if not self._main:
            return
        if fields.get("checkpoint", "") is None:
            del fields["checkpoint"]
        self._written = time.monotonic()
        self._fields.update(fields, seconds=round(self._worked + self._written - self._began, 1))
        write_status(self._run_dir, **self._fields)
