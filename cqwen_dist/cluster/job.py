"""Python parts of a batch script: check a run before it starts, and decide at its end whether to requeue it.

    begin   checks the config and counts this start; prints the run folder, its log folder and a free port
    end     prints `done`, `stopped`, `requeue SECONDS` or `failed`; the reason and the failed rank's log go to stderr

Each start and each end adds one line to `slurm/history.jsonl` in the run folder. A start without a new checkpoint
counts against the budget, unless it was stopped from outside. The number of checkpoints is finite, so the number of
restarts is too.
"""

import argparse
import json
import os
import platform
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cqwen_dist.cluster.launch import preflight
from cqwen_dist.config import Said, UserError, printable
from cqwen_dist.parallel.launcher import free_port
from cqwen_dist.run import files
from cqwen_dist.run.files import is_number, not_followed, read_line, read_lines, read_object
from cqwen_dist.run.status import read_status

FIRST_WAIT_S, LONGEST_WAIT_S = 10, 600
LINES = 20  # lines shown from the failed rank's log


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """Starts and ends (`event`) recorded by `begin` and `judge`, oldest first.

    Skips lines cut off by a crash, and lines of a stranger's file with other types. step: of the newest checkpoint.
    """
    numbers = {"start": ("time", "start", "step"), "end": ("time", "step")}
    texts = {"start": ("job", "nodes"), "end": ("how", "reason")}
    return [
        entry
        for entry in read_lines(run_dir / files.SLURM / files.HISTORY)
        if (event := str(entry.get("event"))) in numbers
        and all(is_number(entry.get(key)) for key in numbers[event])
        and all(isinstance(entry.get(key), str) for key in texts[event])
    ]


def fruitless_starts(history: list[dict[str, Any]]) -> int:
    """Number of consecutive starts of this job without a new checkpoint, excluding those stopped from outside.

    A start without an end lost its host or was ended by SLURM; it counts like a lost rank. A start stopped by its time
    limit also counts: otherwise a limit too short for one step would requeue the job forever.
    """
    count, step = 0, None
    for entry in history:
        if entry["event"] == "start":
            # A new checkpoint or a new submission (start 0) resets the count.
            fresh = entry["start"] == 0 or entry["step"] != step
            count, step = (1 if fresh else count + 1), entry["step"]
        elif entry["how"] in ("preempted", "cancelled") and entry.get("asked") != "USR1":
            count -= 1
    return count


def begin(config: Path, overrides: list[str], max_restarts: int) -> tuple[Path, Path]:
    """Returns (run folder, log folder of this start). Raises `UserError` for wrong input or an exhausted budget."""
    run_dirs = [Path(checked.run.dir).absolute() for checked in preflight(config, overrides)]
    run_dir = run_dirs[0]  # the job's record is here
    for each in run_dirs:
        if not str(each).isprintable():
            raise UserError("run.dir", str(each), "printable text")
    job, start = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    entry = {"event": "start", "job": job, "start": start, "nodes": os.environ.get("SLURM_JOB_NODELIST", "")}
    of_runs = {"runs": [str(each) for each in run_dirs], "status_before": [_stamp(each) for each in run_dirs]}
    _record(run_dir, {**entry, "step": _latest_step(run_dirs), **of_runs})
    # This start is in the history already, so one more than the budget is still within it
    tries = fruitless_starts(read_history(run_dir))
    if tries > max_restarts + 1:
        said = f"{tries - 1} starts in a row without a new checkpoint; look at the logs, then call sbatch again"
        raise UserError("this job", Said(said), "")
    logs = run_dir / files.SLURM / f"job-{job}" / f"start-{start}"
    logs.mkdir(parents=True, exist_ok=True)
    latest = run_dir / files.SLURM / "latest"
    fresh = latest.with_name(f"latest.{os.getpid()}")
    # Replace the link atomically: `tail -F slurm/latest/...` may read it at any time.
    fresh.symlink_to(logs.relative_to(run_dir / files.SLURM))
    fresh.replace(latest)
    return run_dir, logs


def judge(run_dir: Path, logs: Path, phase: str, code: int, asked: str, max_restarts: int) -> tuple[str, str]:
    """Returns (verdict for the script, reason) at the end of a start.

    phase: the last phase that ran, preflight or train, with exit code `code`; asked: signal received: no, USR1 or TERM.
    """
    started = next(entry for entry in reversed(read_history(run_dir)) if entry["event"] == "start")
    runs = [Path(each) for each in started["runs"]]
    # The end of the first run that did not end well is that of the job
    worst = next(
        (i for i, each in enumerate(runs) if read_status(each)["status"] not in ("done", "paused", "fatal")), 0
    )
    how, reason = _ending(runs[worst], logs, phase, code, asked, started["status_before"][worst])
    step = _latest_step(runs)
    _record(run_dir, {"event": "end", "how": how, "reason": reason, "asked": asked, "code": code, "step": step})
    if how in ("done", "cancelled", "fatal"):
        return {"done": "done", "cancelled": "stopped", "fatal": "failed"}[how], reason
    # Exponential back-off between requeues while no new checkpoint appears.
    tries = 0 if step != started["step"] else fruitless_starts(read_history(run_dir))
    if tries > max_restarts:
        return "failed", reason
    # A preempted job did nothing wrong: it goes back into the queue at once
    wait = 0 if how == "preempted" else min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** max(0, tries - 1))
    return f"requeue {wait}", reason


def _ending(run_dir: Path, logs: Path, phase: str, code: int, asked: str, before: list[Any] | None) -> tuple[str, str]:
    """Returns (done, fatal, cancelled, preempted or lost; reason). before: `_stamp` at the start."""
    status = read_status(run_dir)
    written = status["status"] if _stamp(run_dir) != before else ""  # only if this start wrote it
    failed, silent, _ = _ranks(logs)
    # A rank's error counts before any signal: requeueing would only repeat it.
    if status["status"] in ("done", "paused") and phase == "train" and code == 0:
        return "done", ""
    if failed:
        return "fatal", _words_of(logs, failed[0])
    if written == "fatal":
        return "fatal", str(status.get("reason"))
    if phase == "preflight" and code == 1:
        return "fatal", "the nodes cannot run this: see the preflight"
    if asked == "TERM":
        return "cancelled", "SLURM asked it to end"
    if written == "preempted":
        return "preempted", str(status.get("reason") or asked)
    if asked == "USR1":
        return "preempted", asked
    if silent:
        ranks = ", ".join(map(str, silent))
        return "lost", f"ended without a message (killed, perhaps for memory, or the host is lost): rank {ranks}"
    return "lost", str(status.get("reason") or f"exit code {code}")


def guilty_log(logs: Path) -> Path | None:
    """Log of the rank that failed first; else of a killed rank; else of the rank that ended first."""
    failed, silent, ended = _ranks(logs)
    ranks = [*(ending["rank"] for ending in failed), *silent, *(ending["rank"] for ending in ended)]
    return logs / f"rank-{ranks[0]}.log" if ranks else None


def _record(run_dir: Path, entry: dict[str, Any]) -> None:
    """Append a line in a single write, so that lines from multiple hosts do not mix, nor with one that was cut off."""
    path = run_dir / files.SLURM / files.HISTORY
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"time": round(time.time(), 3), "host": platform.node(), **entry}) + "\n"
    with open(path, "ab+", buffering=0, opener=not_followed) as file:
        whole = not file.seek(0, os.SEEK_END) or (file.seek(-1, os.SEEK_END), file.read(1))[1] == b"\n"
        file.write((line if whole else f"\n{line}").encode())


def _latest_step(run_dirs: Sequence[Path]) -> int:
    """The steps of the newest checkpoints, of all runs together."""
    found = (re.search(r"\d+$", read_line(run_dir / files.LATEST), re.ASCII) for run_dir in run_dirs)
    return sum(int(step[0]) for step in found if step)


def _stamp(run_dir: Path) -> list[Any] | None:
    """Inode and modification time of status.json. Each write changes them, because writes replace the file."""
    try:
        stat = (run_dir / files.STATUS).stat()
    except OSError:
        return None
    return [stat.st_ino, stat.st_mtime_ns]


def _ranks(logs: Path) -> tuple[list[dict[str, Any]], list[int], list[dict[str, Any]]]:
    """Returns endings of failed ranks, ranks without an ending (killed, or their host is lost), and all endings.

    Each rank writes its ending to a file. Endings are sorted by time.
    """
    found = [read_object(path) for path in logs.glob("rank-*.ended")]
    endings = sorted((ending for ending in found if ending), key=lambda ending: float(ending["time"]))
    began = {int(path.stem.partition("-")[2]) for path in logs.glob("rank-*.log")}
    failed = [ending for ending in endings if ending["how"] in ("failed", "wrong input")]
    return failed, sorted(began - {int(ending["rank"]) for ending in endings}), endings


def _words_of(logs: Path, ending: dict[str, Any]) -> str:
    """Why a rank failed: its exception, or its error line for the user."""
    errors = [line for line in _tail(logs / f"rank-{ending['rank']}.log") if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if ending["how"] == "wrong input" and errors else str(ending["message"])


def _tail(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [printable(line.rstrip("\n").rpartition("\r")[2]) for line in deque(file, LINES)]
    except OSError:
        return []


def main() -> None:
    """Run a verb from the module's docstring. Wrong input: exit code 2 and one line on stderr."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("begin", "end"))
    parser.add_argument("--max-restarts", type=int)  # for begin and end; the next three are for end
    parser.add_argument("--phase", choices=("preflight", "train"))
    parser.add_argument("--code", type=int)
    parser.add_argument("--asked")
    parser.add_argument("words", nargs="+")
    given = parser.parse_args()
    words: list[str] = given.words
    try:
        if given.verb == "begin":
            run_dir, logs = begin(Path(words[0]), words[1:], given.max_restarts)
            sys.stdout.write(f"{run_dir}\n{logs}\n{free_port()}\n")
        else:
            _end(Path(words[0]), Path(words[1]), given)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


def _end(run_dir: Path, logs: Path, given: argparse.Namespace) -> None:
    verdict, reason = judge(run_dir, logs, given.phase, given.code, given.asked, given.max_restarts)
    how = read_history(run_dir)[-1]["how"]
    why = f": {reason}" if reason else ""
    sys.stderr.write(f"{how}{why}; latest checkpoint: step {_latest_step([run_dir])}; {verdict}\n")
    if how in ("fatal", "lost"):
        log = logs / "preflight.log" if given.phase == "preflight" else guilty_log(logs)
        if log is not None:
            sys.stderr.write("\n".join([f"--- the last lines of {log}", *_tail(log), ""]))
    sys.stdout.write(f"{verdict}\n")


if __name__ == "__main__":
    main()
