"""What is a checkpoint and what is not: manifest, verify, list, latest. No torch, no run: folders made by hand."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cqwen_dist.checkpoint.manifest import (
    FORMAT,
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
from cqwen_dist.run.files import file_record, write_atomically
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


def test_a_file_record_has_size_and_sha256(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert file_record(tmp_path / "f") == {"size": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}


def test_a_complete_checkpoint_verifies_and_is_the_latest(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 7)
    assert verify(folder) == []
    assert latest_checkpoint(tmp_path) == folder
    assert resolve_checkpoint(tmp_path) == resolve_checkpoint(folder) == (tmp_path, folder)


def test_a_checkpoint_folder_leads_to_its_run_also_through_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(run := tmp_path / "run", 7)
    (run / "config.yaml").touch()
    for place, name in ((folder, "."), (folder.parent, folder.name), (folder, f"../{folder.name}")):
        monkeypatch.chdir(place)
        assert resolve_checkpoint(name)[0] == run
    (run / "best").symlink_to(folder)
    assert resolve_checkpoint(run / "best")[0] == run
    folder.rename(elsewhere := tmp_path / "kept")
    folder.symlink_to(elsewhere)
    assert resolve_checkpoint(folder)[0] == run


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_names_each_damaged_file(tmp_path: Path, damage: str) -> None:
    folder = make_checkpoint(tmp_path, 7)
    act: Callable[[Path], None] = DAMAGES[damage]
    act(folder / "a.safetensors")
    assert verify(folder) == [f"a.safetensors: {_said(damage)}"]


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
    with pytest.raises(UserError, match=r"a\.safetensors"):
        resolve_checkpoint(folder)
    chosen, said = choose_checkpoint(tmp_path, "last-good")
    assert (chosen, later.is_dir()) == (good, True)
    assert f"step-00000007 is damaged (a.safetensors: {_said(damage)}): going on from step-00000005" in said


def test_resume_never_refuses_an_existing_run_and_allows_a_new_one(tmp_path: Path) -> None:
    assert choose_checkpoint(tmp_path, "never") == (None, "")
    make_checkpoint(tmp_path, 3)
    with pytest.raises(UserError, match=r"run\.resume: found 'never', allowed: auto or last-good.*step-00000003"):
        choose_checkpoint(tmp_path, "never")


@pytest.mark.parametrize("pointer", [None, "", "\0", "../../elsewhere", "checkpoints/a/b"])
def test_without_a_readable_pointer_latest_is_the_newest_complete_checkpoint(
    tmp_path: Path, pointer: str | None
) -> None:
    make_checkpoint(tmp_path, 3)
    newest = make_checkpoint(tmp_path, 7)
    (tmp_path / "latest").unlink() if pointer is None else (tmp_path / "latest").write_text(pointer)
    assert latest_checkpoint(tmp_path) == newest


def test_a_pointer_to_a_missing_folder_is_damage(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3)
    shutil.rmtree(make_checkpoint(tmp_path, 7))
    with pytest.raises(UserError, match=r"manifest\.json: missing.*step-00000003"):
        latest_checkpoint(tmp_path)


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


def test_without_any_valid_checkpoint_the_error_says_so(tmp_path: Path) -> None:
    flip(make_checkpoint(tmp_path, 3) / "a.safetensors")
    with pytest.raises(UserError, match="no other checkpoint is good"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1, "files": {}}'])
def test_a_folder_with_an_unreadable_manifest_is_not_a_checkpoint(tmp_path: Path, content: str) -> None:
    folder = make_checkpoint(tmp_path, 3)
    (folder / "manifest.json").write_text(content)
    assert list_checkpoints(tmp_path) == []
    assert "missing or not readable" in verify(folder)[0]
    with pytest.raises(UserError, match=r"manifest\.json"):
        resolve_checkpoint(folder)


@pytest.mark.parametrize("files", [None, [], {"a": None}, {"a": {"size": "x"}}])
def test_a_manifest_of_another_format_is_refused(tmp_path: Path, files: object) -> None:
    folder = make_checkpoint(tmp_path, 3)
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "step": 3, "stage": "s", "files": files}))
    assert verify(folder)
    assert list_checkpoints(tmp_path) == []


def test_a_half_written_folder_is_not_listed(tmp_path: Path) -> None:
    good = make_checkpoint(tmp_path, 3)
    (tmp_path / "checkpoints" / "step-00000009").mkdir()
    make_checkpoint(tmp_path, 11).rename(tmp_path / "checkpoints" / ".step-00000011.partial")
    assert list_checkpoints(tmp_path) == [good]


def test_a_run_without_a_latest_pointer_has_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(UserError, match=r"model.warm_start: found .* manifest.json, or a PEFT adapter"):
        resolve_checkpoint(tmp_path, "model.warm_start")
    with pytest.raises(UserError, match="a run folder with `latest`"):
        resolve_checkpoint(tmp_path)


def test_write_atomically_leaves_no_temporary_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "f", "old")
    write_atomically(tmp_path / "f", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "new"


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
