"""`cqwen status`: the state of a run or job, from the run folder and scontrol. Needs no SLURM accounting."""

import subprocess
import time
from contextlib import suppress
from pathlib import Path
from shutil import which
from typing import Any

from cqwen_dist.cluster.job import read_history
from cqwen_dist.config.errors import UserError
from cqwen_dist.run.files import CONFIG, HISTORY, LOCK, SLURM
from cqwen_dist.run.status import read_status, run_in

# scontrol keys to show.
_KEYS = ["JobId", "JobName", "JobState", "Reason", "RunTime"]
_KEYS += ["TimeLimit", "StartTime", "NodeList", "Restarts", "StdOut"]
STALE_S = 60.0  # a run that takes steps writes its status every 10 s, and touches its lock every 5 s


def look(run_or_job: str) -> dict[str, Any]:
    """The status file plus `run`, `job` (from scontrol), `history` (starts and ends), `stale_s` and `lock_s`.

    stale_s, lock_s: seconds since a running run wrote its status, and since its process touched the lock, as it always
    does.
    Raises `UserError` if neither such a folder nor such a job exists.
    """
    folder, job = run_in(Path(run_or_job)), None
    if not folder.is_dir():
        if not run_or_job.replace("_", "").isdecimal():
            raise UserError("RUN", run_or_job, "a run's folder, or the id of a job")
        if (job := job_of(run_or_job)) is None:
            raise UserError("JOB", run_or_job, "a job that SLURM still knows (or the run's folder)")
        if (found := _run_of(job)) is None:
            return {"status": "not started", "run": None, "job": _of_interest(job), "history": []}
        folder = found
    history = read_history(folder)
    starts = [entry for entry in history if entry["event"] == "start"]
    if job is None and starts:
        job = job_of(starts[-1]["job"])
    status = read_status(folder)
    if status["status"] == "unknown":
        if not history and not (folder / CONFIG).is_file():
            raise UserError("RUN", run_or_job, f"a run's folder (it holds {CONFIG}), or the id of a job")
        status = {"status": "starting"} if starts else status
    document: dict[str, Any] = {**status, "run": str(folder), "job": _of_interest(job), "history": history}
    if document["status"] == "running" and "updated" in document:
        document["stale_s"] = round(max(0.0, time.time() - document["updated"]), 1)
        with suppress(OSError):  # no such file
            document["lock_s"] = round(max(0.0, time.time() - (folder / LOCK).stat().st_mtime), 1)
    return document


def _run_of(job: dict[str, str]) -> Path | None:
    """A started job's run folder: from the job's comment, or RUN in its output path RUN/slurm/JOB.out."""
    named = (Path(job.get("Comment", "")), Path(job.get("StdOut", "")).parent.parent)
    return next((run for run in named if run.name and (run / SLURM / HISTORY).is_file()), None)


def job_of(job: str) -> dict[str, str] | None:
    """Fields of `scontrol show job`; None without scontrol or without such a job."""
    if which("scontrol") is None or not job.replace("_", "").isdecimal():  # it may come from an untrusted source's file
        return None
    done = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True)
    if done.returncode:
        return None
    found: dict[str, str] = {}
    for line in done.stdout.split("\n\n")[0].splitlines():
        # Values of these keys may contain spaces and fill their line; other lines have multiple key=value words.
        to_the_end = line.lstrip().startswith(("Comment=", "StdOut=", "WorkDir=", "Command="))
        for word in [line.strip()] if to_the_end else line.split():
            key, _, value = word.partition("=")
            found[key] = value
    return found


_FACTS = {"checkpoint": "last checkpoint: {}", "mirrored": "last mirrored: {}", "restarts": "resumed {} times"}


def lines(document: dict[str, Any]) -> list[str]:
    """Format the document as text, one fact per line."""
    step, total, stage = document.get("step"), document.get("total_steps"), document.get("stage")
    where = "" if step is None else f", step {step}{f' of {total}' if total else ''}"
    found = [f"{document['status']}{where}{f', stage {stage}' if stage else ''}"]
    found += [f"why: {document['reason']}"] if document.get("reason") else []
    if document.get("stale_s", 0) > STALE_S:
        lives = document.get("lock_s", STALE_S) < STALE_S
        why = "its process lives, and starts, evaluates, saves or hangs" if lives else "it was killed"
        found.append(f"no step for {document['stale_s']:.0f} s by this host's clock: {why}")
    if document.get("seconds"):
        eta = document.get("eta_s")
        found.append(f"{_time(document['seconds'])} at work{f', {_time(eta)} to go' if eta else ''}")
    found += [text.format(document[key]) for key, text in _FACTS.items() if document.get(key)]
    found += [_history_line(entry) for entry in document["history"]]
    if document["job"]:
        found.append("job: " + ", ".join(f"{key} {value}" for key, value in document["job"].items()))
    if document["history"]:
        found.append(f"logs: {Path(document['run']) / SLURM / 'latest'}")
    return found


def _history_line(entry: dict[str, Any]) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["time"]))
    if entry["event"] == "start":
        return f"  {at}  job {entry['job']} start {entry['start']} on {entry['nodes']} from step {entry['step']}"
    why = f": {entry['reason']}" if entry["reason"] else ""
    return f"  {at}  {entry['how']} at step {entry['step']}{why}"


def _of_interest(job: dict[str, str] | None) -> dict[str, str] | None:
    return None if job is None else {key: job[key] for key in _KEYS if job.get(key, "None") not in ("None", "(null)")}


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
