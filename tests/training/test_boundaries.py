"""Where a stage ends and the next begins: decided by evaluation, gone on from on either side, moments carried over."""

import shutil
from pathlib import Path

import pytest
from support.runs import cqwen_forked, losses, metrics, set_back, train_run, write_config
from torch import Tensor

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.checkpoint.resume import TrainState, load_checkpoint

B1, B2 = 0.9, 0.999
ENDS = 6  # evaluations after 2, 4 and 6 steps; the base's accuracy does not change
STAGES = [
    {"name": "heads", "train": ["heads", "embedding"], "lr": 1e-2, "schedule": "constant",
     "until": {"max_steps": 40, "patience": 2, "metric": "eval/base_accuracy"}},
    {"name": "both", "train": ["heads", "embedding", "lora"], "steps": 4, "lr": 1e-2,
     "sequence_length": 24, "global_batch_size": 8, "micro_batch_size": 4,
     "reg_weight": {"start": 0.1, "end": 1.0}},
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks over such a boundary, with a checkpoint at each step."""
    folder = tmp_path_factory.mktemp("boundary")
    often = {"train__checkpoint_every": 1, "train__keep_checkpoints": 30, "train__eval_every": 2}
    config = write_config(folder, stages=STAGES, train__max_grad_norm="usual", **often)
    train_run(config, world=2)
    return folder / "run"


def state_at(run: Path, step: int) -> TrainState:
    return load_checkpoint(checkpoint_folder(run, step), (0, 2**62))


def everything(state: TrainState) -> dict[str, Tensor]:
    moments = {**state.feature_moments, **state.head_moments, **state.row_moments}
    return {**state.features, **state.heads, **state.rows, **moments}


def test_the_stage_ends_when_evaluation_stops_improving(run: Path) -> None:
    records = metrics(run)
    assert [record["stage"] for record in records] == ["heads"] * ENDS + ["both"] * 4
    assert [record["step"] for record in records if "eval/accuracy" in record] == [2, 4, 6, 8, 10]
    assert [record["train/reg_weight"] for record in records[ENDS:]] == pytest.approx([0.1, 0.4, 0.7, 1.0])
    saved = state_at(run, ENDS).state
    assert saved["stage"] == "heads"
    assert saved["schedule"]["stops"] == [ENDS, ENDS + 4]
    assert state_at(run, ENDS - 1).state["schedule"]["stops"] == [40, 44]


@pytest.mark.parametrize("step", [3, ENDS])
def test_resumes_before_at_and_after_a_stage_boundary(run: Path, tmp_path: Path, step: int) -> None:
    """Before the decision and at the boundary: to the bit what the run without a stop is."""
    copy = tmp_path / "run"
    train_run(set_back(run, copy, step), f"run.dir={copy}", world=2)
    assert losses(copy) == losses(run)
    norms = [state_at(folder, ENDS + 4).state["norms"] for folder in (copy, run)]
    assert norms[0] == norms[1], "by which the next step would be clipped"
    mine, theirs = everything(state_at(copy, ENDS + 4)), everything(state_at(run, ENDS + 4))
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not mine[name].equal(theirs[name])] == []


def test_moments_of_groups_that_keep_training_are_kept(run: Path) -> None:
    """One Adam step over the boundary: both moments give one and the same gradient only if both were carried."""
    before, after = state_at(run, ENDS), state_at(run, ENDS + 1)
    assert (before.state["loader"]["stage"], after.state["loader"]["stage"]) == (0, 1), "an epoch of its own"
    old, new = everything(before), everything(after)
    carried = [name.removesuffix(".exp_avg") for name in old if name.endswith(".exp_avg") and ".lora_" not in name]
    assert len(carried) > 8
    for name in carried:
        gradient = (new[f"{name}.exp_avg"] - B1 * old[f"{name}.exp_avg"]) / (1 - B1)
        squared = (new[f"{name}.exp_avg_sq"] - B2 * old[f"{name}.exp_avg_sq"]) / (1 - B2)
        scale = float(squared.abs().max().clamp(min=1e-12))
        assert float((gradient.square() - squared).abs().max()) < 2e-3 * scale, name
        assert old[f"{name}.exp_avg"].any(), f"{name} had no moment to carry"
    assert before.state["feature_steps"] == {"embedding": ENDS, "lora": 0}
    assert after.state["feature_steps"] == {"embedding": ENDS + 1, "lora": 1}
    assert set(after.state["head_steps"].values()) == {ENDS + 1}


def test_a_stages_micro_batch_size_may_change_on_resume_its_batch_size_not(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    train_run(run.parent / "config.yaml", f"run.dir={copy}", "stages.1.micro_batch_size=2")
    done = cqwen_forked("train", run.parent / "config.yaml", f"run.dir={copy}", "stages.1.global_batch_size=16")
    assert done.returncode == 2
    assert "stages.1.global_batch_size" in done.stderr
