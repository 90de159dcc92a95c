"""`cqwen status`: what a run or a job is doing, from the run's folder and scontrol; no accounting is needed."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from shutil import which
from typing import Any

from cqwen_dist.cluster.batch import read_history
from cqwen_dist.config import UserError
from cqwen_dist.run.files import CONFIG, HISTORY, SLURM
from cqwen_dist.run.status import read_status

STALE_S = 60.0  # a run that says nothing for so long is not at work: it writes every ten seconds


def look(run_or_job: str) -> dict[str, Any]:
    """The status file, and beside it `run`, `job` (of scontrol), `history` (starts and ends), `stale_s`.

    Raises `UserError` where there is neither such a folder nor such a job.
    """
    folder, job = Path(run_or_job), None
    if not folder.is_dir():
        if not run_or_job.replace("_", "").isdecimal():
            raise UserError("RUN", run_or_job, "a run's folder, or the id of a job")
        job = job_of(run_or_job)
        if job is None:
            raise UserError("JOB", run_or_job, "a job that SLURM still knows (or the run's folder)")
        named = (Path(job.get("Comment", "")), Path(job.get("StdOut", "")).parent.parent)  # ours: RUN/slurm/JOB.out
        found = next((run for run in named if run.name and (run / SLURM / HISTORY).is_file()), None)
        if found is None:
            return {"status": "not started", "run": None, "job": _of_interest(job), "history": []}
        folder = found
    history = read_history(folder)
    starts = [entry for entry in history if entry["event"] == "start"]
    if job is None and starts:
        job = job_of(starts[-1]["job"])
    status = read_status(folder)
    if status["status"] == "unknown" and not history and not (folder / CONFIG).is_file():
        raise UserError("RUN", run_or_job, f"a run's folder (it holds {CONFIG}), or the id of a job")
    if status["status"] == "unknown" and starts:
        status = {"status": "starting"}
    document: dict[str, Any] = {**status, "run": str(folder), "job": _of_interest(job), "history": history}
    if document["status"] == "running" and "updated" in document:
        document["stale_s"] = round(max(0.0, time.time() - document["updated"]), 1)
    return document


def job_of(job: str) -> dict[str, str] | None:
    """What `scontrol show job` says, by key; None where there is no scontrol, or no such job any more."""
    if which("scontrol") is None:
        return None
    done = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True)
    if done.returncode:
        return None
    found: dict[str, str] = {}
    for line in done.stdout.split("\n\n")[0].splitlines():
        if line.lstrip().startswith(("Comment=", "StdOut=", "WorkDir=", "Command=")):  # to the end of the line
            words = [line.strip()]
        else:
            words = line.split()
        for word in words:
            key, _, value = word.partition("=")
            found[key] = value
    return found


def lines(document: dict[str, Any]) -> list[str]:
    """The document for people, a line a fact."""
    said = []
    step, total = document.get("step"), document.get("total_steps")
    where = "" if step is None else f", step {step}{f' of {total}' if total else ''}"
    stage = f", stage {document['stage']}" if document.get("stage") else ""
    said.append(f"{document['status']}{where}{stage}")
    if document.get("reason"):
        said.append(f"why: {document['reason']}")
    if document.get("stale_s", 0) > STALE_S:
        said.append(f"silent for {document['stale_s']:.0f} s: it was killed, or hangs")
    if document.get("seconds"):
        eta = document.get("eta_s")
        said.append(f"{_time(document['seconds'])} at work{f', {_time(eta)} to go' if eta else ''}")
    if document.get("checkpoint"):
        said.append(f"last checkpoint: {document['checkpoint']}")
    if document.get("restarts"):
        said.append(f"gone on with {document['restarts']} times")
    for entry in document["history"]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["time"]))
        if entry["event"] == "start":
            said.append(
                f"  {at}  job {entry['job']} start {entry['start']} on {entry['nodes']} from step {entry['step']}"
            )
        else:
            why = f": {entry['reason']}" if entry["reason"] else ""
            said.append(f"  {at}  {entry['how']} at step {entry['step']}{why}")
    if document["job"]:
        said.append("job: " + ", ".join(f"{key} {value}" for key, value in document["job"].items()))
    if document["history"]:
        said.append(f"logs: {Path(document['run']) / SLURM / 'latest'}")
    return said


def _of_interest(job: dict[str, str] | None) -> dict[str, str] | None:
    keys = (
        "JobId",
        "JobName",
        "JobState",
        "Reason",
        "RunTime",
        "TimeLimit",
        "StartTime",
        "NodeList",
        "Restarts",
        "StdOut",
    )
    return None if job is None else {key: job[key] for key in keys if key in job and job[key] not in ("None", "(null)")}


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
