"""The terminal closes, the launcher is killed, nobody reads: a run stops in order or goes on, and no process stays."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.runs import command_environment, cqwen_forked, write_config

LONG = [{"name": "heads", "train": ["heads", "embedding"], "steps": 100_000, "lr": 1e-3}]


def status(run: Path) -> dict[str, object]:
    try:
        return dict(json.loads((run / "status.json").read_text()))
    except (OSError, ValueError):
        return {}


def started(command: list[object], run: Path, **options: object) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "cqwen_dist", *map(str, command)]
    process = subprocess.Popen(words, env=command_environment(), start_new_session=True, **options)  # type: ignore[call-overload]
    began = time.monotonic()
    while not status(run).get("step"):
        assert process.poll() is None, "it ended before it began"
        assert time.monotonic() - began < 200, "it did not begin"
        time.sleep(0.2)
    return process


def at_work(run: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(run.parent / "config.yaml") in process.cmdline():
                found.append(process)
        except psutil.Error:
            pass
    return found


def nobody_left(run: Path, seconds: float = 60.0) -> bool:
    began = time.monotonic()
    while at_work(run) and time.monotonic() - began < seconds:
        time.sleep(0.2)
    return not at_work(run)


@pytest.mark.parametrize("blow", ["the terminal closes", pytest.param("kill -9", marks=pytest.mark.slow)])
def test_a_launcher_that_is_gone_takes_its_ranks_with_it_in_order(tmp_path: Path, blow: str) -> None:
    config = write_config(tmp_path, stages=LONG, train__checkpoint_every=50_000)
    run = tmp_path / "run"
    ours, theirs = pty.openpty()
    process = started(["launch", config, "--ranks", 2], run, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        assert len(at_work(run)) >= 4, "launcher, DeepSpeed's two, ranks"
        if blow == "kill -9":
            process.kill()
        else:
            os.close(ours)
            process.send_signal(signal.SIGHUP)  # the kernel's part, where it is the controlling terminal
        process.wait(100)
        assert nobody_left(run)
    finally:
        for left in at_work(run):
            left.kill()
    assert {"status": "preempted"}.items() <= status(run).items(), "steps were lost"
    assert status(run)["checkpoint"] == f"step-{status(run)['step']:08d}"


def test_under_nohup_a_terminal_that_closes_stops_nothing_and_nobody_need_read(tmp_path: Path) -> None:
    config = write_config(tmp_path, stages=[{**LONG[0], "steps": 300}], train__checkpoint_every=200)
    run = tmp_path / "run"
    ignoring = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    reading, writing = os.pipe()
    os.close(reading)
    process = started(["train", config], run, stdout=writing, stderr=writing, **ignoring)
    os.close(writing)
    process.send_signal(signal.SIGHUP)
    assert process.wait(100) == 0
    assert status(run)["status"] == "done"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "cqwen_dist", "config", "schema"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, env=command_environment())
    said = "error: output: found No space left on device, allowed: a place that can be written\n"
    assert (done.returncode, done.stderr) == (2, said)
    assert cqwen_forked("config", "schema").returncode == 0
