"""Checkpoints in an object store: uploaded whole, fetched on an empty disk, kills between any two writes."""

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import losses, metrics, set_back, train_run

from cqwen_dist.checkpoint.manifest import Retention, list_checkpoints, verify
from cqwen_dist.checkpoint.mirror import Mirror
from cqwen_dist.checkpoint.saving import Saver
from cqwen_dist.config import UserError, load_config
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.run.status import read_status
from cqwen_dist.tools.slurm.run_status import lines, look
from cqwen_dist.training import train
from cqwen_dist.training.train import open_session


def _texts_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _run_with(source: Path, folder: Path, steps: tuple[int, ...]) -> Path:
    """A run folder with some of the checkpoints of a finished run."""
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "start.json"):
        shutil.copy(source / name, folder / name)
    for step in steps:
        name = f"checkpoints/step-{step:08d}"
        shutil.copytree(source / name, folder / name)
    return folder


def _upload(url: str, run: Path, step: int) -> list[str]:
    said: list[str] = []
    mirror = Mirror(url, run, said.append)
    mirror.push(f"step-{step:08d}")
    mirror.wait()
    return said


def test_a_checkpoint_comes_back_equal_to_the_bit(one_rank: Path, tmp_path: Path) -> None:
    url, run = f"file://{tmp_path}/store/run-1", _run_with(one_rank, tmp_path / "run", (2, 4))
    assert _upload(url, run, 4) == []
    empty = tmp_path / "empty"
    assert Mirror(url, empty).fetch() == "step-00000004"
    assert _texts_of(empty / "checkpoints") == {
        name: data for name, data in _texts_of(run / "checkpoints").items() if "00000004" in name
    }
    assert (empty / "latest").read_text().strip() == "checkpoints/step-00000004"
    assert (empty / "config.yaml").read_bytes() == (run / "config.yaml").read_bytes()
    assert Mirror(url, empty).fetch() is None, "a folder with a checkpoint keeps it"


def test_checkpoint_stays_while_it_is_uploaded(one_rank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow link each would be deleted before it is whole in the store, and the store would stay empty."""
    mirror = Mirror(f"file://{tmp_path}/store", run := _run_with(one_rank, tmp_path / "run", (2, 3, 4)))
    put, began, deleted = mirror._store.put_file, threading.Event(), threading.Event()

    def slow(file: str, there: str) -> None:
        began.set()
        assert deleted.wait(60)
        put(file, there)

    monkeypatch.setattr(mirror._store, "put_file", slow)
    mirror.push("step-00000002")
    assert began.wait(60)
    saver = Saver(run, None, Retention(newest=1), mirror=mirror)  # type: ignore[arg-type]
    saver._prune(4)
    deleted.set()
    mirror.wait()
    assert Mirror(f"file://{tmp_path}/store", tmp_path / "empty").fetch() == "step-00000002"
    assert [folder.name for folder in list_checkpoints(run)] == ["step-00000002", "step-00000004"]
    saver._prune(4)
    assert [folder.name for folder in list_checkpoints(run)] == ["step-00000004"]


def test_a_run_does_not_replace_another_runs_checkpoints(one_rank: Path, tmp_path: Path) -> None:
    """A copied config: the second run would delete what the first has stored."""
    url, run = f"file://{tmp_path}/store", _run_with(one_rank, tmp_path / "run", (2, 4))
    _upload(url, run, 4)
    other = _run_with(one_rank, tmp_path / "other", (2,))
    start = json.loads((other / "start.json").read_text())
    (other / "start.json").write_text(json.dumps(start | {"eval": {}}))
    with pytest.raises(UserError, match="found the checkpoints of another run, allowed: a store for each run"):
        Mirror(url, other).fetch()
    assert Mirror(url, run).fetch() is None, "its own"
    assert Mirror(f"file://{tmp_path}/none", other).fetch() is None, "an empty store"


def test_a_damaged_copy_is_passed_over_with_a_note(one_rank: Path, tmp_path: Path) -> None:
    url, run = f"file://{tmp_path}/store", _run_with(one_rank, tmp_path / "run", (3, 4))
    for step in (3, 4):
        _upload(url, run, step)
    heads = tmp_path / "store" / "checkpoints" / "step-00000004" / "heads.safetensors"
    data = bytearray(heads.read_bytes())
    data[-1] ^= 1
    heads.write_bytes(data)
    said: list[str] = []
    assert Mirror(url, tmp_path / "empty", said.append).fetch() == "step-00000003"
    assert said == ["note: run.mirror: step-00000004 is damaged in the store (heads.safetensors: checksum differs from "
                    "the manifest)"]  # fmt: skip


def test_a_failed_upload_leaves_no_half_and_the_next_one_is_whole(one_rank, tmp_path, monkeypatch) -> None:
    """The store is full in the middle of step 3. A half of a killed upload (step 2) goes too."""
    store, run = tmp_path / "store", _run_with(one_rank, tmp_path / "run", (3, 4))
    killed = store / "checkpoints" / "step-00000002"
    killed.mkdir(parents=True)
    (killed / "heads.safetensors").write_bytes(b"half")
    mirror = Mirror(f"file://{store}", run)
    put = mirror._store.put_file

    def full(file: str, there: str) -> None:
        put(file, there)
        if there.endswith("step-00000003/heads.safetensors"):
            Path(there).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(mirror._store, "put_file", full)
    for step in (3, 4):
        mirror.push(f"step-{step:08d}")
        mirror.wait()
    assert [path.name for path in (store / "checkpoints").iterdir()] == ["step-00000004"]
    failed, done = mirror.news
    assert failed == ("step-00000003", "run.mirror: step-00000003 is not mirrored: [Errno 28] No space left on device")
    assert done == ("step-00000004", None)


def test_an_upload_that_fails_is_an_alarm_and_the_status_names_the_last_one(two_ranks: Path, tmp_path: Path) -> None:
    copy, store = tmp_path / "copy", tmp_path / "store"
    config = set_back(two_ranks, copy, 3)
    (store / "metrics.jsonl").mkdir(parents=True)  # where a file goes: each upload fails
    train_run(config, f"run.dir={copy}", f"run.mirror=file://{store}", "train.checkpoint_every=1", world=2)
    alarms = [json.loads(line) for line in (copy / "alarms.jsonl").read_text().splitlines()]
    assert [alarm["kind"] for alarm in alarms][-1:] == ["not-mirrored"]
    assert "last mirrored: none" in lines(look(str(copy)))
    (store / "metrics.jsonl").rmdir()
    train_run(config, f"run.dir={copy}", f"run.mirror=file://{store}", "stages.1.steps=4", world=2)
    assert {"status": "done", "mirrored": "step-00000007"}.items() <= read_status(copy).items()
    assert "last mirrored: step-00000007" in lines(look(str(copy)))


WRITES = ("put_file", "rm_file", "rm")


def _uploads_until(url: str, run: str, step: int, last: int) -> int:
    """Upload, and die at write number `last`, after half of its bytes. Returns their number."""
    mirror = Mirror(url, Path(run))
    done = 0

    def counting(name: str, write: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done == last:
                if name == "put_file":
                    Path(args[1]).parent.mkdir(parents=True, exist_ok=True)
                    Path(args[1]).write_bytes(Path(args[0]).read_bytes()[: os.path.getsize(args[0]) // 2])
                os._exit(9)
            return write(*args, **options)

        return counted

    for name in WRITES:
        setattr(mirror._store, name, counting(name, getattr(mirror._store, name)))
    mirror._upload(f"step-{step:08d}")
    return done


def _in_fork(*args: Any) -> int:
    """Exit code of `_uploads_until` in a process of its own."""
    process = os.fork()
    if not process:
        os._exit(0 if _uploads_until(*args) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_a_kill_between_any_two_writes_leaves_a_whole_checkpoint(one_rank: Path, tmp_path: Path) -> None:
    """Within one, too: half of its bytes are there."""
    run = _run_with(one_rank, tmp_path / "run", (3,))
    first = f"file://{tmp_path}/first"
    _upload(first, run, 3)
    shutil.copytree(one_rank / "checkpoints" / "step-00000004", run / "checkpoints" / "step-00000004")
    shutil.rmtree(run / "checkpoints" / "step-00000003")  # so the upload of step 4 also deletes
    shutil.copytree(tmp_path / "first", tmp_path / "count")
    writes = _uploads_until(f"file://{tmp_path}/count", str(run), 4, 0)
    found = []
    for last in range(1, writes + 1):
        store = tmp_path / f"store-{last}"
        shutil.copytree(tmp_path / "first", store)
        assert _in_fork(f"file://{store}", str(run), 4, last) == 9
        empty = tmp_path / f"empty-{last}"
        found.append(Mirror(f"file://{store}", empty).fetch())
        assert verify(list_checkpoints(empty)[-1]) == []
        assert _in_fork(f"file://{store}", str(run), 4, 0) == 0, "the next upload mends it"
        assert Mirror(f"file://{store}", tmp_path / f"again-{last}").fetch() == "step-00000004"
    assert set(found) == {"step-00000003", "step-00000004"}
    assert found == sorted(found), "the older one until the newer one is whole"


def test_a_run_goes_on_from_its_mirror_on_an_empty_disk(two_ranks: Path, tmp_path: Path) -> None:
    """Equal to the bit: the same losses, with the base and the log that were fetched."""
    mirror = f"file://{tmp_path}/store"
    config = set_back(two_ranks, tmp_path / "run", 4)
    given = [f"run.dir={tmp_path}/run", f"run.mirror={mirror}"]
    _upload(mirror, tmp_path / "run", 4)
    shutil.rmtree(tmp_path / "run")
    train_run(config, *given, world=2)
    assert losses(tmp_path / "run") == losses(two_ranks)
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    shutil.rmtree(tmp_path / "run")  # the end is mirrored too, and the same command finds that it is done
    train_run(config, *given, world=2)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "done"
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(AssertionError, match=r"run\.mirror: found the checkpoints of a run with another train\.seed"):
        train_run(config, *given, "train.seed=9", world=1)
    left = {path.name for path in (tmp_path / "run").rglob("*")}
    assert left <= {"lock", "checkpoints", "status.json"}, "the folder stays free for a run of its own"


def test_a_run_that_starts_over_puts_its_stored_checkpoints_aside(one_rank, tmp_path, monkeypatch) -> None:
    """Until its first upload the store would have the old run, which the next command fetches, or refuses."""
    monkeypatch.setattr(train, "main_rank_first", lambda action: action())
    url, run = f"file://{tmp_path}/store", tmp_path / "run"
    config = set_back(one_rank, run, 4)
    _upload(url, run, 4)
    sweep = tmp_path / "store" / "0" / "checkpoints"
    sweep.mkdir(parents=True)
    given, runtime = [f"run.dir={run}", f"run.mirror={url}"], Runtime(0, 1, torch.device("cpu"), 60.0)
    with open_session(load_config(config, [*given, "run.resume=restart", "train.seed=9"]), runtime):
        (run / "start.json").write_text("{}")  # killed here
    (archive,) = (tmp_path / "store").glob("archived-*")
    assert {"checkpoints", "config.yaml", "start.json", "base"} <= {path.name for path in archive.iterdir()}
    assert Mirror(f"file://{archive}", tmp_path / "back").fetch() == "step-00000004"
    assert sweep.is_dir(), "other runs may lie below"
    with open_session(load_config(config, [*given, "train.seed=9"]), runtime):
        assert not list_checkpoints(run), "the run that was put aside"
    _upload(url, _run_with(one_rank, tmp_path / "later", (2,)), 2)
    shutil.rmtree(run)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with open_session(load_config(config, [*given, "run.resume=restart"]), runtime):
        assert [path.name for path in list_checkpoints(run)] == ["step-00000002"], "a requeued job resumes"
