"""A tensor that is missing, strange or of another shape is told by its name, wherever weights are read."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from support.exported import tiny_pair, write_folder
from support.ranks import run_ranks
from support.runs import as_rank, set_back, train_run
from support.tiny import HIDDEN, tiny_base, tiny_model
from torch import Tensor

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import UserError, load_config
from cqwen_dist.config.training import ConstraintConfig
from cqwen_dist.model.base_loading import load_base
from cqwen_dist.model.configuration import EXPORT_FORMAT
from cqwen_dist.run.files import file_record
from cqwen_dist.tools.vllm.vllm_writer import VllmWriter
from cqwen_dist.training.constraint import Constraint
from cqwen_dist.training.parameter_groups import feature_members
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

WARM = ("no rows", "broadcast", "nan")


@contextmanager
def spoiled(folder: Path, case: str) -> Iterator[None]:
    """The checkpoint as in this case, inside."""
    kept = shutil.copytree(folder, folder.with_name("kept"))
    edit(folder, *CASES[case][:2])
    yield
    shutil.rmtree(folder)
    kept.rename(folder)


def refusals(config: str, overrides: list[str], folder: str, cases: list[str]) -> dict[str, str]:
    """What a run says of the checkpoint in each case; what loads its own says the same."""
    from cqwen_dist.training.train import train_on

    found = {}
    for case in cases:
        with spoiled(Path(folder), case):
            with pytest.raises(UserError) as refused:
                train_on(load_config(config, overrides), as_rank())
            found[case] = str(refused.value)
            if "moments" not in case and "warm_start" not in str(overrides):
                with pytest.raises(UserError, match=CASES[case][2]):
                    load_trained(Path(folder))
    return found


def test_a_checkpoint_with_mismatched_tensors_is_refused(one_rank: Path, tmp_path: Path) -> None:
    config, run = set_back(one_rank, tmp_path / "run", 3), tmp_path / "run"
    found = run_ranks(refusals, 1, str(config), [f"run.dir={run}"], str(checkpoint_folder(run, 3)), [*CASES])[0]
    assert {case for case, text in found.items() if f"checkpoint: found {CASES[case][2]}" not in text} == set(), found


def test_a_warm_start_with_mismatched_tensors_or_settings_is_refused(one_rank: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint_folder(one_rank, 3), tmp_path / "run" / "checkpoints" / "step-00000003")
    shutil.copy(one_rank / "config.yaml", tmp_path / "run")
    config, warm = one_rank.parent / "config.yaml", [f"run.dir={tmp_path / 'new'}", f"model.warm_start={folder}"]
    found = run_ranks(refusals, 1, str(config), warm, str(folder), [*WARM])[0]
    assert {case for case in WARM if f"model.warm_start: found {CASES[case][2]}" not in found[case]} == set(), found
    with pytest.raises(AssertionError, match=r"model\.number_head: found 'laplace', allowed: cauchy, as in"):
        train_run(config, *warm, "model.number_head=laplace")


def test_a_constraints_start_with_missing_tensors_is_refused(tmp_path: Path) -> None:
    model, path = tiny_model(number_dims=2), tmp_path / "start.safetensors"
    shapes = {m.name: m.parameter.shape for m in feature_members(model.features)}
    constraint = Constraint(model, ConstraintConfig(), model.kept_features, shapes)
    tensors = {f"abduction.{name}": value for name, value in model.abduction.state_dict().items()}
    tensors |= {f"features.embedding.{name}": torch.ones(HIDDEN) for name in ("w_num", "num_row")}
    tensors["spread"] = torch.ones(HIDDEN + 2)
    save_file(tensors | {"adapted": torch.tensor(True)}, path)
    load_start(constraint, path, constraint.state_dict())
    save_start(constraint, path)
    changes: list[tuple[Change, str]] = [
        (lambda t: t.pop("abduction.loc_net.weight"), "no abduction.loc_net.weight"),
        (lambda t: t.update(x=torch.zeros(2)), "x, which is no part of the model"),
        (put("features.embedding.w_num", lambda v: v[:1]), "features.embedding.w_num of shape [1]"),
        (put("spread", with_nan), "spread with a NaN or an infinity"),
    ]
    for change, said in changes:
        change(spoilt := load_file(path))
        save_file({key: value.contiguous() for key, value in spoilt.items()}, tmp_path / "other.safetensors")
        with pytest.raises(UserError, match=re.escape(f"loss.constraint: found {said}")):
            load_start(constraint, tmp_path / "other.safetensors", constraint.state_dict())


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


def test_a_spoiled_export_is_refused_in_one_line(tmp_path: Path) -> None:
    """Its tensors, its config's values, its tokenizer, and files that are cut."""
    folder = write_folder(tmp_path, *tiny_pair())
    weights, config, policy = (folder / name for name in ("model.safetensors", "config.json", "number_policy.json"))
    whole = {path: path.read_bytes() for path in (weights, config, policy)}

    def refused(said: str, path: Path, content: bytes, *loads: Callable[[Path], Any]) -> None:
        path.write_bytes(content)
        for load in loads or (load_trained,):
            with pytest.raises(UserError, match=said) as refusal:
                load(folder)
            assert "\n" not in str(refusal.value)
        path.write_bytes(whole[path])

    changes: list[tuple[Change, str]] = [
        (lambda t: t.pop("model.action.cls_weight"), "no model.action.cls_weight"),
        (put("model.action.cls_weight", lambda v: v[:, :1]), "another shape of .*model.action.cls_weight"),
        (lambda t: t.update(more=torch.zeros(3)), "found more"),
        (put("model.action.cls_weight", lambda v: v.int()), "model.action.cls_weight of I32"),
    ]
    for change, said in changes:
        change(tensors := load_file(weights))
        spoilt = {name: value.contiguous() for name, value in tensors.items()}
        refused(f"CHECKPOINT: (found .*)?{said}", weights, save(spoilt, {"format": "pt"}))
    for name, value in {
        "num_token_id": "x",
        "used_rows": 0,
        "scale_activation": "relu",
        "scale_floor": -1,
        "target": {"name": "standardise", "scale": 0},
    }.items():
        refused(f"{name}: found ", config, json.dumps({**json.loads(whole[config]), name: value}).encode())
    refused("CHECKPOINT: found", weights, whole[weights][: len(whole[weights]) // 2])
    for wrong in ({"base": [1]}, {"hidden_size": "wide"}, {"vocab_size": -3}):
        refused("CHECKPOINT: found", config, json.dumps(json.loads(whole[config]) | wrong).encode())
    for written in (EXPORT_FORMAT + 1, None):
        edited = json.dumps(json.loads(whole[config]) | {"causal_qwen_format": written}).encode()
        refused(f"config.json: causal_qwen_format: found .*, allowed: {EXPORT_FORMAT}", config, edited)
    # The model would read every number as a word that it has never seen
    other = json.loads(whole[policy])
    other["num_token_id"] += 1
    said = r"num_token_id: found \d+, allowed: \d+, as in config.json"
    refused(said, policy, json.dumps(other).encode(), load_trained, VllmWriter)
    refused(r"number_policy\.json: found", policy, b'{"num_token_id": 1e999, "policy": {}}')
