"""Whole runs on a base in 8 or 4 bits: ranks, resuming, what a checkpoint and an export of them hold."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.numerics import assert_close
from support.runs import losses, metrics, set_back, train_run, weights, write_config

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install cqwen-dist[quant])")

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.checkpoint.trained import load_exported, load_trained
from cqwen_dist.config.trainable import is_lora
from cqwen_dist.tools.export.export import export, probe
from cqwen_dist.training.evaluation.evaluate_checkpoint import evaluate_checkpoint

KINDS = ("int8", "nf4")


def config_of(folder: Path, kind: str, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    sizes = {f"model__architecture__{key}": size for key, size in sizes.items()}
    return write_config(folder, model__quantize=kind, **sizes, **changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of each kind on one rank."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for kind in KINDS:
        precision = {"int8": "fp32", "nf4": "bf16"}[kind]
        lora = {"r": 2, "alpha": 4, "dropout": 0.1}
        train_run(config_of(folder / kind, kind, model__lora=lora, train__precision=precision))
        found[kind] = folder / kind / "run"
    return found


@pytest.mark.parametrize(
    ("kind", "zero", "sequence"), [("int8", 2, 1), ("nf4", 2, 2)], ids=["int8", "nf4 in sequence groups"]
)
def test_two_ranks_give_the_losses_of_one(tmp_path: Path, kind: str, zero: int, sequence: int) -> None:
    found = []
    for world in (1, 2):
        folder = tmp_path / str(world)
        changes: dict[str, Any] = {"train__micro_batch_size": 6 * sequence // world, "parallel__zero_stage": zero}
        if sequence > 1:
            changes |= {"model__attention": "varlen", "parallel__sequence_group_size": world}
        train_run(config_of(folder, kind, **changes), world=world)
        found.append(losses(folder / "run"))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(runs: dict[str, Path], tmp_path: Path) -> None:
    """The base is rounded again, from the same files."""
    config = set_back(runs["nf4"], tmp_path / "run", 4)  # within the stage of the adapters
    train_run(config, f"run.dir={tmp_path / 'run'}")
    assert weights(tmp_path / "run") == weights(runs["nf4"])
    with pytest.raises(Exception, match=r"model\.quantize"):
        train_run(config, f"run.dir={tmp_path / 'run'}", "model.quantize=int8")


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_runs_on_the_rounded_base_and_its_export_on_the_full_one(runs, tmp_path, kind) -> None:
    run = runs[kind]
    for file in checkpoint_folder(run, 6).glob("*.safetensors"):
        names = load_file(file)
        assert not any("base_layer" in name or "absmax" in name for name in names), "the base is not saved"
    rounded, _ = load_trained(run)
    full, _ = load_trained(run, full_base=True)
    kinds = [{name: p.dtype for name, p in each.named_parameters() if is_lora(name)} for each in (rounded, full)]
    assert kinds[0] == kinds[1], "adapters in the precision of the run"
    assert all(p.is_floating_point() for p in full.parameters())
    folder = export(run, tmp_path / "out")
    merged = export(run, tmp_path / "merged", merge=True)
    for out in (folder, merged):
        found = probe(load_exported(out).eval())
        for name, value in probe(full).items():  # merging rounds to bf16
            assert_close(found[name], value, 5e-2 if kind == "nf4" and out is merged else 1e-4, name)
        about = json.loads((out / "training.json").read_text())
        assert about["quantize"] == kind
        assert 0 < about["rounded"]["logits"] < 1
        assert f"Trained on the base in {kind}; this folder has the full base." in (out / "README.md").read_text()
    assert not torch.equal(probe(rounded)["loc_U"], probe(full)["loc_U"])
    evaluated = evaluate_checkpoint(run, None)
    shutil.copytree(run / "base", tmp_path / "base")
    whole = evaluate_checkpoint(run, None, base=str(tmp_path / "base"))["eval/base_perplexity"]
    assert abs(whole / evaluated["eval/base_perplexity"] - 1) > 2e-3, "the run's own base is the rounded one"
    keys = ("eval/cls_loss_mean", "eval/base_perplexity", "eval/reg_mdae")
    for key in keys[: 3 if kind == "int8" else 2]:  # 13 numbers; bf16 moves them
        rounding = 1e-5 if kind == "int8" else 1e-2  # bf16, in other batches
        assert evaluated[key] == pytest.approx(metrics(run)[-1][key], rel=rounding), key
