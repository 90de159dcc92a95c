"""What is a checkpoint and what is not: manifest, verify, list, latest. No torch, no run: folders made by hand."""

import errno
import fcntl
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cqwen_dist.checkpoint.manifest import (
    FORMAT,
    Retention,
    checkpoint_folder,
    choose_checkpoint,
    finish_renames,
    latest_checkpoint,
    leftovers,
    list_checkpoints,
    put_aside,
    resolve_checkpoint,
    verify,
)
from cqwen_dist.config import UserError
from cqwen_dist.run import folder as lock
from cqwen_dist.run.files import file_record, write_atomically
from cqwen_dist.run.folder import run_lock
from cqwen_dist.run.status import read_status, write_status


def make_checkpoint(run: Path, step: int) -> Path:
    folder = checkpoint_folder(run, step)
    folder.mkdir(parents=True)
    (folder / "a.safetensors").write_bytes(bytes(range(200)))
    (folder / "state.json").write_text(json.dumps({"step": step}))
    files = {name: file_record(folder / name) for name in ("a.safetensors", "state.json")}
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "step": step, "stage": "s", "files": files}))
    write_atomically(run / "latest", f"checkpoints/{folder.name}\n")
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {"checksum differs": flip, "199 bytes, 200 in the manifest": truncate, "missing": Path.unlink}


def _said(damage: str) -> str:
    return "checksum differs from the manifest" if damage.startswith("checksum") else damage


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_latest_checkpoint_is_refused_or_the_previous_one_is_used(tmp_path: Path, damage: str) -> None:
    make_checkpoint(tmp_path, 3)
    good = make_checkpoint(tmp_path, 5)
    later = make_checkpoint(tmp_path, 9)
    folder = make_checkpoint(tmp_path, 7)  # `latest`: the run was set back to it
    DAMAGES[damage](folder / "a.safetensors")
    for look in (latest_checkpoint, resolve_checkpoint):
        with pytest.raises(UserError, match=r"a\.safetensors.*run\.resume=last-good goes on from .*step-00000005"):
            look(tmp_path)
    assert verify(folder) == [f"a.safetensors: {_said(damage)}"]
    chosen, said = choose_checkpoint(tmp_path, "last-good")
    assert (chosen, later.is_dir()) == (good, True)
    assert f"step-00000007 is damaged (a.safetensors: {_said(damage)}): going on from step-00000005" in said


def test_resume_never_refuses_an_existing_run_and_allows_a_new_one(tmp_path: Path) -> None:
    assert choose_checkpoint(tmp_path, "never") == (None, "")
    make_checkpoint(tmp_path, 3)
    with pytest.raises(UserError, match=r"run\.resume: found 'never', allowed: auto or last-good.*step-00000003"):
        choose_checkpoint(tmp_path, "never")


@pytest.mark.parametrize("pointer", [None, "\0", "../../elsewhere"])
def test_without_a_readable_pointer_latest_is_newest_complete_checkpoint(tmp_path: Path, pointer: str | None) -> None:
    make_checkpoint(tmp_path, 3)
    newest = make_checkpoint(tmp_path, 7)
    (tmp_path / "latest").unlink() if pointer is None else (tmp_path / "latest").write_text(pointer)
    assert latest_checkpoint(tmp_path) == newest


def test_a_complete_checkpoint_that_a_kill_left_unnamed_is_renamed(tmp_path: Path) -> None:
    """The same step written again replaces the old one by two renames; `latest` names it all the while."""
    make_checkpoint(tmp_path, 3)
    folder = make_checkpoint(tmp_path, 7)
    folder.rename(folder.with_name(".step-00000007.partial"))
    torn = make_checkpoint(tmp_path, 9)
    torn = torn.rename(torn.with_name(".step-00000009.partial"))
    flip(torn / "a.safetensors")
    write_atomically(tmp_path / "latest", "checkpoints/step-00000007\n")
    finish_renames(tmp_path)
    assert latest_checkpoint(tmp_path) == folder
    assert torn.is_dir(), "what is not whole gets no name"


def test_an_interrupted_deletion_leaves_no_checkpoint_and_is_finished_later(tmp_path: Path) -> None:
    """A name is taken first; one that nothing took the place of, and that is whole still, gets it back."""
    kept, half, whole = (make_checkpoint(tmp_path, step) for step in (9, 3, 5))
    (put_aside(half) / "a.safetensors").unlink()
    put_aside(whole)
    assert list_checkpoints(tmp_path) == [kept]
    finish_renames(tmp_path)
    assert list_checkpoints(tmp_path) == [whole, kept]
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"format": 1, "files": {}}', f'{{"format": {FORMAT}, "step": 3, "stage": "s", "files": []}}'],
)
def test_a_folder_with_an_unreadable_manifest_is_not_a_checkpoint(tmp_path: Path, content: str) -> None:
    folder = make_checkpoint(tmp_path, 3)
    (folder / "manifest.json").write_text(content)
    assert list_checkpoints(tmp_path) == []
    assert verify(folder)
    with pytest.raises(UserError, match=r"manifest\.json"):
        resolve_checkpoint(folder)


def test_a_run_without_a_latest_pointer_has_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(UserError, match=r"model.warm_start: found .* manifest.json, or a PEFT adapter"):
        resolve_checkpoint(tmp_path, "model.warm_start")
    with pytest.raises(UserError, match="a run folder with `latest`"):
        resolve_checkpoint(tmp_path)


def test_a_status_round_trips_and_a_broken_one_is_unknown(tmp_path: Path) -> None:
    assert read_status(tmp_path) == {"status": "unknown"}
    write_status(tmp_path, "fatal", reason="why")
    assert {"status": "fatal", "reason": "why"}.items() <= read_status(tmp_path).items()
    for text in ("{", "[]", '"x"', "3"):
        (tmp_path / "status.json").write_text(text)
        assert read_status(tmp_path) == {"status": "unknown"}


def test_copies_and_foreign_files_are_ignored_and_kept(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 10)
    beside = folder.parent
    for name in (".bak", "0", " (copy)"):
        shutil.copytree(folder, folder.with_name(folder.name + name))
    foreign = [".step-notes", ".step-10.replaced", "step-00000011", ".step-00000012.partial.txt", "README"]
    for name in foreign:
        (beside / name).write_text("mine")
    before = sorted(path.name for path in beside.iterdir())
    finish_renames(tmp_path)
    (tmp_path / "latest").unlink()
    assert list_checkpoints(tmp_path) == [folder]
    assert latest_checkpoint(tmp_path) == folder
    assert leftovers(beside) == []
    assert sorted(path.name for path in beside.iterdir()) == before


LOSS = "eval/cls_loss_mean"


def figures(*losses: float | None) -> dict[int, dict[str, float]]:
    """Checkpoints of steps 10, 20, ...; None: not evaluated at that step."""
    return {10 * n: {} if loss is None else {LOSS: loss} for n, loss in enumerate(losses, 1)}


def kept(rule: Retention, found: dict[int, dict[str, float]]) -> list[int]:
    newest = max(found)
    return sorted(set(found) - set(rule.outdated(found, newest)))


def test_keeps_the_newest_and_the_best() -> None:
    found = figures(3.0, 1.0, None, 2.0, 2.5, 2.6)
    assert kept(Retention(newest=2), found) == [50, 60]
    assert kept(Retention(newest=1, best=2), found) == [20, 40, 60]
    assert kept(Retention(newest=1, best=1, higher=True), found) == [10, 60]


def test_ties_keep_the_later_checkpoint_and_nan_is_never_best() -> None:
    assert Retention(best=2).best_of(figures(1.0, math.nan, 1.0, 5.0)) == [30, 10]


def test_checkpoints_beyond_the_current_step_do_not_count() -> None:
    """A run set back to step 20 writes step 30: 40 and 50, of before, neither count nor go."""
    assert Retention(newest=1).outdated(figures(1, 1, 1, 1, 1), 30) == [10, 20]


@given(st.dictionaries(st.integers(1, 50), st.none() | st.floats(), min_size=1), st.integers(0, 3), st.integers(0, 3))
def test_the_checkpoint_just_written_is_kept(found: dict[int, float | None], newest: int, best: int) -> None:
    known = {step: {} if loss is None else {LOSS: loss} for step, loss in found.items()}
    rule = Retention(newest=newest, best=best)
    for step in known:
        assert step not in rule.outdated(known, step)


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
