"""Runs whose steps compute a part of the negatives: what is drawn again, what is shared, what stays full."""

import json
from pathlib import Path

import pytest
from support.runs import losses, metrics, set_back, train_run, write_config
from test_resume import weights_of

from cqwen_dist.training.evaluation.evaluate_checkpoint import evaluate_checkpoint

SAMPLED = ("loss.negatives=sampled", "loss.negatives_share=0.3")


@pytest.fixture(scope="module")
def sampled_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampled")
    train_run(write_config(folder, train__keep_checkpoints=10), *SAMPLED)
    return folder / "run"


@pytest.mark.parametrize("step", [2, 4])
def test_resuming_draws_the_same_words(sampled_run: Path, tmp_path: Path, step: int) -> None:
    copy = tmp_path / "run"
    config = set_back(sampled_run, copy, step)
    train_run(config, *SAMPLED, f"run.dir={copy}")
    assert weights_of(copy) == weights_of(sampled_run)
    assert losses(copy) == losses(sampled_run)


def test_each_step_micro_batch_and_seed_draws_other_words(sampled_run: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    for name, option in (
        ("seed", "train.seed=1"),
        ("full", "loss.negatives=full"),
        ("small", "train.micro_batch_size=3"),
    ):
        given = () if name == "full" else SAMPLED
        train_run(config, *given, option, f"run.dir={tmp_path / name}", "stages.0.lr=1e-9", "stages.1.lr=1e-9")
    first = [losses(tmp_path / name)[0] for name in ("full", "small")]
    assert losses(sampled_run)[0] != pytest.approx(first[0], rel=1e-5)
    assert losses(sampled_run)[0] != pytest.approx(first[1], rel=1e-5)


def test_evaluations_use_all_words(sampled_run: Path, tmp_path: Path) -> None:
    """At the start the models are equal to the bit, so are their evaluations; and the last is the checkpoint's."""
    train_run(write_config(tmp_path))
    starts = [json.loads((run / "start.json").read_text())["eval"] for run in (tmp_path / "run", sampled_run)]
    assert starts[0] == starts[1]
    last = metrics(sampled_run)[-1]["eval/cls_loss_mean"]
    assert evaluate_checkpoint(sampled_run, None)["eval/cls_loss_mean"] == pytest.approx(last, rel=1e-5)
    assert last < starts[0]["eval/cls_loss_mean"]


@pytest.mark.parametrize("zero", [1, 3])
def test_two_ranks_that_share_the_vocabulary_train_as_one(tmp_path: Path, zero: int) -> None:
    """V = 291 does not divide. With one micro-batch a step on each side, the draws are the same."""
    config = write_config(tmp_path)
    train_run(config, *SAMPLED, "train.micro_batch_size=12")
    shared = (f"run.dir={tmp_path}/two", "parallel.vocab_group_size=2", f"parallel.zero_stage={zero}")
    train_run(config, *SAMPLED, *shared, world=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "run"), rel=1e-5)


def test_replicas_draw_their_own_words(tmp_path: Path) -> None:
    """Their average has less noise; the steps still agree, and the copies of the rows stay the same."""
    config = write_config(tmp_path, train__check_ranks_every=1)
    train_run(config, *SAMPLED, "train.micro_batch_size=12")
    train_run(config, *SAMPLED, f"run.dir={tmp_path}/two", world=2)
    alone, two = losses(tmp_path / "run"), losses(tmp_path / "two")
    assert two != pytest.approx(alone, rel=1e-5)
    assert two == pytest.approx(alone, rel=0.2)
