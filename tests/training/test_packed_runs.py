"""Runs on packed texts without a mask, and on texts split over ranks: the losses of the run with a mask on one rank."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.runs import losses, metrics, set_back, train_run, write_config
from support.tiny import random_batch, tiny_model
from transformers import masking_utils
from transformers.masking_utils import find_packed_sequence_indices

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.config import UserError, load_config
from cqwen_dist.model import varlen
from cqwen_dist.tools.export.export import export
from cqwen_dist.training.step import documents_of

VARLEN = "model.attention=varlen"
SPLIT = ("parallel.sequence_group_size=2",)  # one key is enough
OF_FOUR = ("parallel.sequence_group_size=4", "parallel.vocab_group_size=2")
FAR = "parallel.zero_stage=3", "parallel.vocab_group_size=2", "model.gradient_checkpointing=true"


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank on packed texts with a mask."""
    folder = tmp_path_factory.mktemp("packed")
    shape = {"model__architecture__num_attention_heads": 4, "data__pack": True}
    train_run(write_config(folder, train__checkpoint_every=1, train__keep_checkpoints=9, **shape))
    return folder / "run"


@pytest.fixture(scope="module")
def within(masked: Path) -> Path:
    """The same run without a mask."""
    train_run(masked.parent / "config.yaml", VARLEN, f"run.dir={masked.parent}/within")
    return masked.parent / "within"


@pytest.mark.parametrize("far", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_varlen_runs_have_masks_losses_and_evaluations(masked: Path, within: Path, tmp_path: Path, far: bool) -> None:
    run = tmp_path / "run" if far else within
    if far:
        train_run(masked.parent / "config.yaml", VARLEN, *FAR, f"run.dir={run}", world=2)
    assert losses(run) == pytest.approx(losses(masked), rel=1e-5)
    for name in ("eval/cls_loss_mean", "eval/reg_mdae", "eval/base_accuracy"):
        assert metrics(run)[-1][name] == pytest.approx(metrics(masked)[-1][name], rel=1e-5)


def test_a_varlen_run_resumes_to_the_bit_and_exports_a_standard_attention(within: Path, tmp_path: Path) -> None:
    run, copy = within, tmp_path / "copy"
    train_run(set_back(run, copy, 3), VARLEN, f"run.dir={copy}")
    assert losses(copy) == losses(run)
    name = "heads.safetensors"
    assert len({(checkpoint_folder(folder, 6) / name).read_bytes() for folder in (run, copy)}) == 1
    out = export(run, tmp_path / "out", merge=True)
    assert not [file for file in out.rglob("*.json") if varlen.WITHIN_TEXTS in file.read_text()]


def same(run: Path, other: Path) -> None:
    assert losses(run) == pytest.approx(losses(other), rel=1e-5)
    names = ["train/grad_norm", "eval/cls_loss_mean", "eval/reg_mdae", "eval/base_accuracy", "eval/coverage_90_cal"]
    for name in (name for name in names if name in metrics(other)[-1]):
        assert metrics(run)[-1][name] == pytest.approx(metrics(other)[-1][name], rel=1e-4), name


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(4, (*OF_FOUR, "model.gradient_checkpointing=true"), marks=pytest.mark.slow),
        (2, (*SPLIT, "parallel.zero_stage=2")),
    ],
)
def test_runs_on_split_texts_have_the_losses_and_evaluations_of_one_rank(masked, tmp_path, world, options) -> None:
    run = tmp_path / "run"
    train_run(masked.parent / "config.yaml", *options, f"run.dir={run}", world=world)
    same(run, masked)


@pytest.mark.slow
def test_a_run_resumes_with_a_sequence_group_under_zero_3(masked: Path, tmp_path: Path) -> None:
    config = set_back(masked, tmp_path / "run", 2)
    train_run(config, *SPLIT, *FAR[:2], f"run.dir={tmp_path / 'run'}", world=2)
    same(tmp_path / "run", masked)


def test_what_a_part_of_a_text_cannot_do_is_refused_by_key(tmp_path: Path) -> None:
    for option, said in (
        ("model.attention=mask", r"model\.attention: found 'mask', allowed: varlen under parallel\.sequence_group_si"),
        ("model.wide=64", r"model\.wide: found 64, allowed: its default under parallel\.sequence_group_size above 1"),
        ("parallel.sequence_group_size=3", r"sequence_group_size: found 3, allowed: a divisor of the base's 2 att"),
    ):
        with pytest.raises(UserError, match=said):
            load_config(write_config(tmp_path), [*SPLIT, option])
    config = load_config(write_config(tmp_path), SPLIT)
    assert "model.attention is varlen, as parallel.sequence_group_size is 2" in config.fit_to("qwen2")
    with pytest.raises(UserError, match=r"group_size: found 2, allowed: 1: the base has layers of linear_attention"):
        config.parallel.fit_heads({"num_attention_heads": 4, "layer_types": ["full_attention", "linear_attention"]})
    with pytest.raises(UserError, match=r"sequence_group_size: found 2, allowed: a divisor of the 3 ranks: 1, 3"):
        config.parallel.refuse_ranks(3)


@pytest.mark.parametrize("period", [99, 8, 5, 1])
def test_given_texts_make_the_masks_that_transformers_finds(period: int) -> None:
    model, batch = tiny_model(), random_batch()
    batch = replace(batch, position_ids=batch.position_ids % period)
    wanted, documents = model.kept_features(batch, batch.kept), find_packed_sequence_indices(batch.position_ids)
    with documents_of(batch.texts, len(batch.input_ids)):
        found = model.kept_features(batch, batch.kept)
        told = masking_utils.find_packed_sequence_indices(batch.position_ids)
        assert (told is None) == (documents is None) == (period == 99)
        assert documents is None or torch.equal(told, documents)
    assert torch.equal(found, wanted)
    assert masking_utils.find_packed_sequence_indices is find_packed_sequence_indices
