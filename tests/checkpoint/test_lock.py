"""The run's lock: one process at a time, free as soon as its holder is gone, and hosts that cannot see each other's."""

import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cqwen_dist.config import UserError
from cqwen_dist.run import folder as lock
from cqwen_dist.run.folder import run_lock

HOLD = """
import sys, time
from pathlib import Path
from cqwen_dist.run.folder import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_and_a_dead_one_holds_no_lock(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with (
        pytest.raises(UserError, match=rf"run\.dir: found process {holder.pid} on .* at work in it"),
        run_lock(tmp_path),
    ):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with run_lock(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / "lock").read_text() == ""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock of another host, whose kernel's locks this one does not see."""
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    (tmp_path / "lock").write_text(json.dumps({"host": "another", "boot": "another", "pid": 7}))
    return tmp_path


def test_a_lock_of_another_host_with_a_heartbeat_is_respected(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of the same name: containers are often named alike."""
    host = platform.node()
    (elsewhere / "lock").write_text(json.dumps({"host": host, "boot": "another", "pid": 7}))
    meanwhile = SimpleNamespace(sleep=lambda _: os.utime(elsewhere / "lock", ns=(7, 7)))
    monkeypatch.setattr(lock, "time", meanwhile)
    with pytest.raises(UserError, match=f"process 7 on {host} at work in it"), run_lock(elsewhere):
        pass


def test_a_lock_of_another_host_without_a_heartbeat_is_taken_over(elsewhere: Path) -> None:
    with run_lock(elsewhere):
        before = (elsewhere / "lock").stat().st_mtime_ns
        deadline = time.monotonic() + 60
        while (elsewhere / "lock").stat().st_mtime_ns == before:
            assert time.monotonic() < deadline, "the holder gives no sign"
            time.sleep(0.01)


def test_without_file_locks_one_of_two_processes_gets_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(lock, "BEAT_S", 1.0)  # a fifth of it for two that come at once
    monkeypatch.setattr(fcntl, "flock", none)
    got: list[int] = []
    refused: list[UserError] = []
    together, one_is_refused = threading.Barrier(2), threading.Event()

    def take(number: int) -> None:
        together.wait()
        try:
            with run_lock(tmp_path):
                got.append(number)
                one_is_refused.wait(60)
        except UserError as error:
            refused.append(error)
            one_is_refused.set()

    threads = [threading.Thread(target=take, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 1)
