"""Going on from a checkpoint: the same weights to the bit, each step logged once, and what is refused."""

import json
from pathlib import Path

import pytest
from support.runs import losses, metrics, set_back, train_run, weights

from cqwen_dist.checkpoint.manifest import evaluated
from cqwen_dist.run.status import read_status
from cqwen_dist.training.telemetry.metrics import MetricsFile


@pytest.mark.parametrize("step", [3, 5])
def test_resuming_within_and_across_stages_is_equal_to_the_bit(two_ranks: Path, tmp_path: Path, step: int) -> None:
    copy = tmp_path / "run"
    config = set_back(two_ranks, copy, step)
    train_run(config, f"run.dir={copy}", world=2)
    assert weights(copy) == weights(two_ranks)
    assert [record["step"] for record in metrics(copy)] == [1, 2, 3, 4, 5, 6]
    assert losses(copy) == losses(two_ranks)
    assert read_status(copy)["status"] == "done"


def test_with_a_wide_part_a_checkpoint_of_the_start_resumes_like_any_other(one_rank: Path, tmp_path: Path) -> None:
    config, run = one_rank.parent / "config.yaml", tmp_path / "run"
    often = "model.wide=64", "train.keep_checkpoints=9"
    train_run(config, f"run.dir={run}", *often)
    start = json.loads((run / "start.json").read_text())["eval"]
    assert dict(evaluated(run))[0]["eval/perplexity"] == start["eval/perplexity"], "it may be the best"
    copy = tmp_path / "copy" / "run"
    set_back(run, copy, 0)
    (copy / "start.json").unlink()
    train_run(config, f"run.dir={copy}", *often)
    assert not (copy / "start.json").exists(), "it was calibrated again"
    assert weights(copy) == weights(run)
    assert losses(copy) == losses(run)
    assert [record["step"] for record in metrics(copy)] == [1, 2, 3, 4, 5, 6]


def test_a_run_resumes_with_other_groups_and_zero_stages(two_ranks: Path, one_rank: Path, tmp_path: Path) -> None:
    """A checkpoint knows of no ranks: from two, the rows go to a vocabulary group of three, the features to ZeRO-3, and
    back to one rank."""
    copy, step = tmp_path / "run", 2
    config = set_back(two_ranks, copy, step)
    spread = ["parallel.vocab_group_size=3", "parallel.zero_stage=3", "train.micro_batch_size=4"]
    train_run(config, f"run.dir={copy}", *spread, world=3)
    assert losses(copy) == pytest.approx(losses(one_rank), rel=1e-5)
    set_back_again = tmp_path / "again" / "run"
    set_back(copy, set_back_again, step + 1)
    train_run(config, f"run.dir={set_back_again}")
    assert losses(set_back_again) == pytest.approx(losses(one_rank), rel=1e-5)


def test_a_finished_run_is_not_changed(one_rank: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in one_rank.rglob("*") if path.is_file()}
    figures = train_run(one_rank.parent / "config.yaml")
    after = {path: path.stat().st_mtime_ns for path in one_rank.rglob("*") if path.is_file()}
    changed = {path.relative_to(one_rank).parts[0] for path in after if before.get(path) != after[path]}
    assert changed <= {"config.yaml", "lock", "digests"}, "digests: of the base's files, remembered"
    assert figures["eval/accuracy"] == metrics(one_rank)[-1]["eval/accuracy"]
    assert read_status(one_rank)["status"] == "done"


def test_a_changed_config_is_refused_by_key_and_changes_nothing(one_rank: Path) -> None:
    """Others may change: train.checkpoint_every, for one."""
    known = (one_rank / "config.yaml").read_text()
    train_run(one_rank.parent / "config.yaml", "train.checkpoint_every=5", "run.name=x")
    said = r"UserError: .*config\.yaml: model\.lora\.r: found .*, with which"
    with pytest.raises(AssertionError, match=said):
        train_run(one_rank.parent / "config.yaml", "model.lora.r=4")
    train_run(one_rank.parent / "config.yaml")
    assert (one_rank / "config.yaml").read_text() == known
    assert read_status(one_rank)["status"] == "done", "another command's mistake is not this run's end"


def test_metrics_after_the_checkpoint_and_broken_lines_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}', '{"step": 2, "x"', "[]", '{"x": 1}', '{"step": null}', "3", '{"step": 2}', '{"step": 3}']
    path.write_text("\n".join(lines) + '\n{"step": 4, "é')
    file = MetricsFile(path, 2)
    file.write({"step": 3})
    file.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
