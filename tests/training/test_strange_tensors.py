"""A tensor that is missing, strange or of another shape is told by its name, wherever weights are read."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.exported import tiny_pair, write_folder
from support.runs import cqwen_forked, set_back
from support.tiny import HIDDEN, tiny_base, tiny_model
from torch import Tensor

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import UserError
from cqwen_dist.config.training import ConstraintConfig
from cqwen_dist.model.base_loading import load_base
from cqwen_dist.run.files import file_record
from cqwen_dist.tools.vllm.vllm_writer import VllmWriter
from cqwen_dist.training.constraint import Constraint
from cqwen_dist.training.state import load_start, save_start

ROWS = "rows-00000000-00000291"
Change = Callable[[dict[str, Tensor]], object]


def edit(folder: Path, name: str, change: Change | None) -> None:
    """Change a checkpoint's file and its manifest alike; None: the file goes."""
    manifest = json.loads((folder / "manifest.json").read_text())
    if change is None:
        (folder / name).unlink()
        del manifest["files"][name]
    else:
        tensors = load_file(folder / name)
        change(tensors)
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
        manifest["files"][name] = file_record(folder / name)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def put(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def with_nan(value: Tensor) -> Tensor:
    value.view(-1)[-1] = torch.nan
    return value


CASES: dict[str, tuple[str, Change | None, str]] = {
    "no rows": (f"{ROWS}.safetensors", None, "no action.cls_bias"),
    "no head": ("heads.safetensors", lambda t: t.pop("action.b_noise"), "no action.b_noise"),
    "no feature": ("features.safetensors", lambda t: t.pop("embedding.w_num"), "no embedding.w_num"),
    "no moments": ("heads.moments.safetensors", lambda t: t.pop("action.b_noise.exp_avg"), "no action.b_noise.exp_avg"),
    "another's": ("heads.safetensors", lambda t: t.update(x=torch.zeros(2)), "x, which is no part of the model"),
    "broadcast": (f"{ROWS}.safetensors", put("action.cls_weight", lambda v: v[:, :1]), "action.cls_weight of shape"),
    "halved": ("heads.safetensors", put("action.reg_weight", lambda v: v.half()), "action.reg_weight of float16"),
    "nan": (f"{ROWS}.safetensors", put("action.cls_weight", with_nan), "action.cls_weight with a NaN or an infinity"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_with_mismatched_tensors_is_refused(one_rank: Path, tmp_path: Path, case: str) -> None:
    name, change, said = CASES[case]
    config = set_back(one_rank, tmp_path / "run", 3)
    folder = checkpoint_folder(tmp_path / "run", 3)
    edit(folder, name, change)
    done = cqwen_forked("train", config, f"run.dir={tmp_path / 'run'}")
    assert done.returncode == 2, done.stderr[-2000:]
    assert f"checkpoint: found {said}" in done.stderr
    if "moments" not in name:
        with pytest.raises(UserError, match=said):
            load_trained(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("num_row"), "no num_row"),
        (lambda t: t.pop("abduction.loc_net.weight"), "no abduction.loc_net.weight"),
        (lambda t: t.update(x=torch.zeros(2)), "x, which is no part of the model"),
        (put("w_num", lambda v: v[:1]), "w_num of shape [1]"),
        (put("spread", lambda v: v[:1]), "spread of shape [1]"),
        (put("spread", with_nan), "spread with a NaN or an infinity"),
    ],
)
def test_a_constraints_start_with_missing_tensors_is_refused(tmp_path: Path, change: Change, said: str) -> None:
    model = tiny_model(number_dims=2)
    constraint = Constraint(model, ConstraintConfig(), lambda batch, keep: model.kept_features(batch, keep))
    tensors = {f"abduction.{name}": value for name, value in model.abduction.state_dict().items()}
    tensors |= {"w_num": torch.ones(HIDDEN), "num_row": torch.ones(HIDDEN), "spread": torch.ones(HIDDEN + 2)}
    tensors["adapted"] = torch.tensor(True)
    path = tmp_path / "start.safetensors"
    save_file(tensors, path)
    load_start(constraint, path, constraint.state_dict())
    save_start(constraint, path)
    tensors = load_file(path)
    change(tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    with pytest.raises(UserError, match=re.escape(f"loss.constraint: found {said}")):
        load_start(constraint, path, constraint.state_dict())


@pytest.mark.parametrize("tied", [False, True])
def test_a_base_with_missing_tensors_is_refused(tmp_path: Path, tied: bool) -> None:
    """transformers fills a gap with random numbers and a warning."""
    tiny_base(tied=tied).save_pretrained(tmp_path)
    load_base(str(tmp_path), torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"model.name_or_path: found .*no model.layers.1.mlp.up_proj.weight"):
        load_base(str(tmp_path), torch.float32)


@pytest.mark.parametrize("case", ["no rows", "broadcast", "nan"])
def test_a_warm_start_with_mismatched_tensors_changes_nothing(one_rank: Path, tmp_path: Path, case: str) -> None:
    name, change, said = CASES[case]
    folder = shutil.copytree(checkpoint_folder(one_rank, 3), tmp_path / "run" / "checkpoints" / "step-00000003")
    shutil.copy(one_rank / "config.yaml", tmp_path / "run")
    edit(folder, name, change)
    warm = [f"run.dir={tmp_path / 'new'}", f"model.warm_start={folder}"]
    done = cqwen_forked("train", one_rank.parent / "config.yaml", *warm)
    assert done.returncode == 2, done.stderr[-2000:]
    assert f"model.warm_start: found {said}" in done.stderr


def test_a_warm_start_compares_settings_and_accepts_older_states(one_rank: Path, tmp_path: Path) -> None:
    """w_num has the same shape for other periods. A state from before a key existed has the key's default."""
    folder = shutil.copytree(checkpoint_folder(one_rank, 3), tmp_path / "run" / "checkpoints" / "step-00000003")
    shutil.copy(one_rank / "config.yaml", tmp_path / "run")
    manifest, state = (json.loads((folder / name).read_text()) for name in ("manifest.json", "state.json"))
    for change, code in (({"value_periods": [10.0]}, 2), ({}, 0)):
        shape = {name: value for name, value in state["model"].items() if name not in ("copies", "value_periods")}
        (folder / "state.json").write_text(json.dumps({**state, "model": {**shape, **change}}))
        manifest["files"]["state.json"] = file_record(folder / "state.json")
        (folder / "manifest.json").write_text(json.dumps(manifest))
        warm = [f"run.dir={tmp_path / 'new'}", f"model.warm_start={folder}"]
        done = cqwen_forked("train", one_rank.parent / "config.yaml", *warm)
        assert done.returncode == code, done.stderr[-2000:]
        assert ("model.value_periods: found [], allowed: [10.0], as in" in done.stderr) == bool(change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.action.cls_weight"), "no model.action.cls_weight"),
        (put("model.action.cls_weight", lambda v: v[:, :1]), "another shape of .*model.action.cls_weight"),
        (lambda t: t.update(more=torch.zeros(3)), "found more"),
        (put("model.action.cls_weight", lambda v: v.int()), "model.action.cls_weight of I32"),
    ],
)
def test_an_export_with_missing_tensors_is_refused(tmp_path: Path, change: Change, said: str) -> None:
    folder = write_folder(tmp_path, *tiny_pair())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"CHECKPOINT: found .*{said}|CHECKPOINT: {said}"):
        load_trained(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_token_id", "x"),
        ("used_rows", 0),
        ("scale_activation", "relu"),
        ("scale_floor", -1),
        ("value_periods", [10, "a"]),
        ("target", {"name": "standardise", "scale": 0}),
    ],
)
def test_an_exported_config_with_an_impossible_value_is_one_line(tmp_path: Path, name: str, value: object) -> None:
    folder = write_folder(tmp_path, *tiny_pair())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(UserError, match=f"{name}: found "):
        load_trained(folder)


@pytest.mark.parametrize("load", [load_trained, VllmWriter])
def test_a_tokenizer_with_another_num_row_is_refused(tmp_path: Path, load: Callable[[Path], Any]) -> None:
    """The model would read every number as a word that it has never seen."""
    folder = write_folder(tmp_path, *tiny_pair())
    policy = json.loads((folder / "number_policy.json").read_text())
    policy["num_token_id"] += 1
    (folder / "number_policy.json").write_text(json.dumps(policy))
    with pytest.raises(UserError, match=r"num_token_id: found \d+, allowed: \d+, as in config.json"):
        load(folder)
    (folder / "number_policy.json").write_text('{"num_token_id": 1e999, "policy": {}}')
    with pytest.raises(UserError, match=r"number_policy\.json: found"):
        load(folder)


@pytest.mark.parametrize("damage", ["cut", "list", "number", "words"])
def test_a_damaged_exported_folder_is_one_line(tmp_path: Path, damage: str) -> None:
    folder = write_folder(tmp_path, *tiny_pair())
    config = json.loads((folder / "config.json").read_text())
    if damage == "cut":
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    else:
        wrong = {"list": {"base": [1]}, "number": {"hidden_size": "wide"}, "words": {"vocab_size": -3}}[damage]
        (folder / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(UserError, match="CHECKPOINT: found"):
        load_trained(folder)
