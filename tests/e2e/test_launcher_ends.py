"""The terminal closes, the launcher is killed, nobody reads: a run stops in order or goes on, and no process stays."""

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.runs import command_environment, cqwen_forked, end_of, wait_for, write_config

LONG = [{"name": "heads", "train": ["heads", "embedding"], "steps": 100_000, "lr": 1e-3}]


def status(run: Path) -> dict[str, object]:
    try:
        return dict(json.loads((run / "status.json").read_text()))
    except (OSError, ValueError):
        return {}


def started(
    command: list[object], run: Path, terminal: int | None = None, **options: object
) -> subprocess.Popen[bytes]:
    """At its first steps. terminal: the side of it that somebody reads until then; a full one would hold the run up."""
    words = [sys.executable, "-m", "cqwen_dist", *map(str, command)]
    process = subprocess.Popen(words, env=command_environment(), start_new_session=True, **options)  # type: ignore[call-overload]

    def has_begun() -> bool:
        assert process.poll() is None, "it ended before it began"
        if terminal is not None:
            with suppress(BlockingIOError):
                os.read(terminal, 1 << 16)
        return bool(status(run).get("step"))

    wait_for("a step", has_begun)
    return process


def at_work(run: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [process] if str(run.parent / "config.yaml") in process.cmdline() else []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("blow", ["the terminal closes", "kill -9"])
def test_ranks_stop_cleanly_when_their_launcher_dies(tmp_path: Path, blow: str) -> None:
    config = write_config(tmp_path, stages=LONG, train__checkpoint_every=50_000)
    run = tmp_path / "run"
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    try:
        process = started(["launch", config, "--ranks", 2], run, ours, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        assert len(at_work(run)) >= 4, "launcher, DeepSpeed's two, ranks"
        if blow == "kill -9":
            process.kill()
        else:
            os.close(ours)
            process.send_signal(signal.SIGHUP)  # the kernel's part, where it is the controlling terminal
        end_of(process)
        wait_for("the end of all", lambda: not at_work(run))
    finally:
        for left in at_work(run):
            with suppress(psutil.NoSuchProcess):
                left.kill()
    assert {"status": "preempted"}.items() <= status(run).items(), "steps were lost"
    assert status(run)["checkpoint"] == f"step-{status(run)['step']:08d}"


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_does_not_stop_the_run(tmp_path: Path) -> None:
    config = write_config(tmp_path, stages=[{**LONG[0], "steps": 300}], train__checkpoint_every=200)
    run = tmp_path / "run"
    ignoring = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    reading, writing = os.pipe()
    os.close(reading)
    process = started(["train", config], run, stdout=writing, stderr=writing, **ignoring)
    os.close(writing)
    process.send_signal(signal.SIGHUP)
    assert end_of(process) == 0
    assert status(run)["status"] == "done"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "cqwen_dist", "config", "schema"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, env=command_environment())
    said = "error: output: found No space left on device, allowed: a place that can be written\n"
    assert (done.returncode, done.stderr) == (2, said)
    assert cqwen_forked("config", "schema").returncode == 0
