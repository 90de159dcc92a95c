"""Saving and loading a state by name: ranges of rows, retention, and a kill at every moment of a save."""

import json
import os
import re
import resource
import shutil
import signal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Pool, run_ranks

from cqwen_dist.checkpoint.manifest import (
    Retention,
    checkpoint_folder,
    latest_checkpoint,
    list_checkpoints,
    read_manifest,
    verify,
)
from cqwen_dist.checkpoint.resume import TrainState, load_checkpoint
from cqwen_dist.checkpoint.saving import About, Saver
from cqwen_dist.config import UserError
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.parallel.vocab_parallel import vocab_range
from cqwen_dist.run.files import write_atomically

ROWS, WIDTH = 7, 3
ADAPTER = "backbone.transformer.a.lora_A.default.weight"


def state_of(start: int, stop: int, tag: float = 0.0, owned: tuple[int, int] | None = None) -> TrainState:
    """A state in which every number tells where it belongs. owned: rows whose moments the rank saves; None: all."""
    own = slice(*(owned or (start, stop)))
    weight = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH) + tag
    threshold = torch.arange(ROWS, dtype=torch.float32) - 100 + tag
    return TrainState(
        features={"embedding.w_num": torch.full((WIDTH,), 1.5 + tag)},
        feature_moments={"embedding.w_num.exp_avg": torch.full((WIDTH,), 2.5)},
        heads={"action.reg_bias": torch.tensor([3.5])},
        head_moments={"action.reg_bias.exp_avg": torch.tensor([4.5])},
        rows={"action.cls_weight": weight[start:stop], "action.threshold": threshold[start:stop]},
        row_moments={"action.cls_weight.exp_avg": -weight[own]},
        row_range=(start, stop),
        moment_range=(own.start, own.stop),
        state={"step": 1, "stage": "heads", "note": "数"},
    )


def save_here(run: str, group_size: int, steps: tuple[int, ...] = (1,), keep: int = 9, kill_at: int = -1) -> int:
    """Save on every rank; kill_at: die at that call of the last save which makes something durable."""
    groups = build_groups(group_size)
    start, stop = vocab_range(ROWS, groups.vocab_rank, groups.vocab_size)
    first, end = vocab_range(stop - start, groups.replica_rank, dist.get_world_size() // group_size)
    owned = start + first, start + end
    calls = 0
    for step in steps:
        if kill_at >= 0 and step == steps[-1] and dist.get_rank() == 0:
            for name in ("fsync", "replace", "rename"):
                plain = getattr(os, name)

                def deadly(*args: Any, plain: Any = plain) -> Any:
                    nonlocal calls
                    if calls == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    calls += 1
                    return plain(*args)

                setattr(os, name, deadly)
        saver = Saver(Path(run), groups, Retention(newest=keep))
        saver.save(lambda step=step: state_of(start, stop, float(step), owned), About(step, "heads", config={"数": 1}))
        saver.wait()
    return calls


def assert_is(found: TrainState, expected: TrainState) -> None:
    for part in ("features", "feature_moments", "heads", "head_moments", "rows", "row_moments"):
        a, b = getattr(found, part), getattr(expected, part)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a), part


@pytest.mark.parametrize(("world", "group_size"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_any_range_of_rows_is_read_from_any_saved_ranges(pool, tmp_path, world, group_size) -> None:
    pool(save_here, world, str(tmp_path), group_size)
    folder = latest_checkpoint(tmp_path)
    assert folder is not None
    for start, stop in [(0, 7), (0, 4), (4, 7), (2, 5), (6, 7), (3, 4)]:
        found = load_checkpoint(folder, (start, stop))
        assert_is(found, state_of(start, stop, 1.0))
        assert found.state["note"] == "数"
    # of the moments any ranges, in the order that is asked for, or none
    found = load_checkpoint(folder, (0, 4), [(5, 7), (0, 2)])
    every = state_of(0, 7, 1.0).row_moments["action.cls_weight.exp_avg"]
    assert torch.equal(found.row_moments["action.cls_weight.exp_avg"], every[[5, 6, 0, 1]])
    assert found.rows["action.cls_weight"].shape == (4, WIDTH)
    bare = load_checkpoint(folder, (0, 4), [])
    assert [bare.row_moments, bare.head_moments, bare.feature_moments] == [{}, {}, {}]
    assert all(not value.numel() for value in load_checkpoint(folder, (7, 7)).rows.values())
    assert_is(load_checkpoint(folder, (0, 2**62)), state_of(0, 7, 1.0))


def test_the_manifest_lists_every_file_and_the_versions(pool: Pool, tmp_path: Path) -> None:
    pool(save_here, 2, str(tmp_path), 2)
    folder = checkpoint_folder(tmp_path, 1)
    manifest = read_manifest(folder)
    assert manifest is not None
    assert set(manifest["files"]) | {"manifest.json"} == {path.name for path in folder.iterdir()}
    assert {"rows-00000000-00000004.safetensors", "rows-00000004-00000007.safetensors"} <= set(manifest["files"])
    assert (manifest["step"], manifest["stage"]) == (1, "heads")
    assert manifest["versions"]["torch"] == version("torch")
    assert manifest["rows"] == [[0, 4], [4, 7]]
    assert manifest["config"] == {"数": 1}
    assert verify(folder) == []


def test_a_run_reset_to_an_earlier_checkpoint_keeps_its_new_checkpoints(pool: Pool, tmp_path: Path) -> None:
    pool(save_here, 1, str(tmp_path), 1, (2, 4, 6), 3)
    write_atomically(tmp_path / "latest", "checkpoints/step-00000002\n")
    pool(save_here, 1, str(tmp_path), 1, (3,), 1)
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 3)
    pool(save_here, 1, str(tmp_path), 1, (4,), 2)  # over the old one of that step
    assert_is(load_checkpoint(checkpoint_folder(tmp_path, 4), (0, 7)), state_of(0, 7, 4.0))
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 4)


def save_empty(run: str) -> str:
    groups = build_groups(1)
    state = state_of(0, 7)
    state.state["model"] = {"lora": {"r": 2}}
    state.features[ADAPTER] = torch.empty(0)
    try:
        saver = Saver(Path(run), groups, Retention())
        saver.save(lambda: state, About(1, "heads"))
        saver.wait()
    except RuntimeError as error:
        return str(error)
    return "saved"


def test_an_empty_tensor_is_refused_by_name_and_no_checkpoint_appears(pool: Pool, tmp_path: Path) -> None:
    """How a sharded optimizer loses an adapter: a tensor of shape (0,)."""
    assert (
        "adapter_model.safetensors: base_model.model.model.a.lora_A.weight is empty"
        in pool(save_empty, 1, str(tmp_path))[0]
    )
    assert latest_checkpoint(tmp_path) is None
    assert list_checkpoints(tmp_path) == []


def test_a_kill_at_any_moment_of_a_save_leaves_a_complete_latest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    calls = run_ranks(save_here, 1, str(tmp_path / "whole"), 1, (1, 2), 9, 10**6)[0]
    assert calls > 10, "the test does not see what the save does"
    moved = 0
    for kill_at in range(calls):
        run = tmp_path / str(kill_at)
        run.mkdir()
        with pytest.raises(AssertionError, match=r"exit codes \[-9\]"):
            run_ranks(save_here, 1, str(run), 1, (1, 2), 9, kill_at)
        folder = latest_checkpoint(run)  # raises where it is damaged
        assert folder is not None
        step = json.loads((folder / "manifest.json").read_text())["step"]
        moved += step == 2
        assert_is(load_checkpoint(folder, (0, 7)), state_of(0, 7, float(step)))
        for listed in list_checkpoints(run):
            assert verify(listed) == []
    assert 1 <= moved <= 2, "the pointer moves at the very end"
    run_ranks(save_here, 1, str(tmp_path / "0"), 1, (3,))
    assert [path.name for path in sorted((tmp_path / "0" / "checkpoints").iterdir())] == [
        "step-00000001",
        "step-00000003",
    ], "the next save sweeps what a kill left"


def test_a_file_that_cannot_be_read_is_a_user_error(pool: Pool, tmp_path: Path) -> None:
    pool(save_here, 1, str(tmp_path), 1)
    folder = checkpoint_folder(tmp_path, 1)
    for name in ("heads.moments.safetensors", "features.safetensors", "state.json"):
        (folder / name).write_bytes(b"\0\0")
        with pytest.raises(UserError, match="files that can be read"):
            load_checkpoint(folder, (0, 7))


def save_from_gpu(run: str) -> None:
    groups = build_groups(1)
    state = state_of(0, 7, 5.0)
    for part in (state.features, state.feature_moments, state.heads, state.head_moments, state.rows, state.row_moments):
        part.update({name: tensor.cuda() for name, tensor in part.items()})
    saver = Saver(Path(run), groups, Retention())
    saver.save(lambda: state, About(1, "heads"))
    for tensor in (*state.rows.values(), *state.heads.values()):
        tensor.zero_()  # the next step, while the copy is written
    saver.wait()


@pytest.mark.gpu
def test_gpu_tensors_are_saved_as_they_were_at_the_save(pool: Pool, tmp_path: Path) -> None:
    pool(save_from_gpu, 1, str(tmp_path))
    folder = latest_checkpoint(tmp_path)
    assert folder is not None
    assert_is(load_checkpoint(folder, (0, 7)), state_of(0, 7, 5.0))


def save_and_step(run: str) -> dict[str, float]:
    groups = build_groups(1)
    state = state_of(0, 7, 5.0)
    saver = Saver(Path(run), groups, Retention())
    saver.save(lambda: state, About(1, "heads"))
    for tensor in (*state.rows.values(), *state.heads.values(), *state.features.values()):
        tensor.zero_()
    saver.wait()
    return saver.take()


def test_the_next_step_does_not_change_the_checkpoint_being_written(pool: Pool, tmp_path: Path) -> None:
    cost = pool(save_and_step, 1, str(tmp_path))[0]
    folder = latest_checkpoint(tmp_path)
    assert folder is not None
    assert_is(load_checkpoint(folder, (0, 7)), state_of(0, 7, 5.0))
    assert cost["perf/save_stall_s"] <= cost["perf/save_s"]


def fail_to_save(run: str) -> list[str]:
    """Rank 1 cannot write its rows; what each method then says."""
    groups = build_groups(2)
    start, stop = vocab_range(ROWS, groups.vocab_rank, 2)
    said: list[str] = []
    saver = Saver(Path(run), groups, Retention(), on_failure=said.append)
    saver.save(lambda: state_of(start, stop), About(1, "heads"))
    saver.wait()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    saver.save(lambda: state_of(start, stop), About(2, "heads"))
    try:
        saver.wait()
    except UserError as error:
        said.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    saver.save(lambda: state_of(start, stop), About(3, "heads"))
    saver.wait()
    return said


def test_a_write_error_on_one_rank_is_raised_on_all_and_keeps_previous_checkpoint(pool: Pool, tmp_path: Path) -> None:
    for failure, error in pool(fail_to_save, 2, str(tmp_path)):
        assert failure == "the checkpoint of step 2 failed"
        assert ".step-00000002.partial: run.dir: found " in error
        assert "File too large" in error
        assert "a disk with free space; rerun the same command to resume from the previous checkpoint" in error
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["step-00000001", "step-00000003"]


def refuse_to_delete(path: Path, ignore_errors: bool = False) -> None:
    if not ignore_errors:
        raise PermissionError(1, "not permitted", str(path))


def save_beside_copies(run: str) -> list[str]:
    groups = build_groups(1)
    said: list[str] = []
    saver = Saver(Path(run), groups, Retention(newest=1), say=said.append)
    for step in (1, 2, 3, 4):
        if step == 2:
            first = checkpoint_folder(Path(run), 1)
            shutil.copytree(first, first.with_name("step-00000001.bak"))
            (first.parent / ".step-notes").write_text("mine")
        if step == 4:
            shutil.rmtree = refuse_to_delete
        saver.save(lambda step=step: state_of(0, 7, float(step)), About(step, "heads"))
        saver.wait()
    return said


def test_a_copied_and_an_undeletable_checkpoint_do_not_stop_saving(tmp_path: Path) -> None:
    (note,) = run_ranks(save_beside_copies, 1, str(tmp_path))[0]
    assert re.fullmatch(r"note: an outdated checkpoint could not be deleted: .*step-00000003.*: not permitted", note)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [".step-00000003.replaced", ".step-notes", "step-00000001.bak", "step-00000004"]
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 4)
