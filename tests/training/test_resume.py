"""Going on from a checkpoint: the same weights to the bit, each step logged once; other inputs are refused by key."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.ranks import run_ranks
from support.runs import as_rank, losses, metrics, set_back, train_run, weights, write_texts

from cqwen_dist.checkpoint.manifest import evaluated
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import UserError, load_config
from cqwen_dist.run.status import read_status
from cqwen_dist.training.telemetry.metrics import MetricsFile
from cqwen_dist.training.train import train_on


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
    often = "model.wide=[64, 0, 2]", "train.keep_checkpoints=9"
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


def other_numbers(run: Path, there: Path) -> list[str]:
    path = there / "other.jsonl"
    path.write_text((run.parent / "texts.jsonl").read_text(encoding="utf-8").replace(".", "000."), encoding="utf-8")
    return [f"data.train={path}"]


def other_order(run: Path, there: Path) -> list[str]:
    path = there / "order.jsonl"
    lines = (run.parent / "texts.jsonl").read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[::-1]) + "\n", encoding="utf-8")
    return [f"data.train={path}"]


def other_tokenizer(run: Path, there: Path) -> list[str]:
    """Two words change places, which none of the texts has."""
    path = there / "run" / "base" / "tokenizer.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    words = tree["model"]["vocab"]
    a, b = sorted(words)[-2:]
    words[a], words[b] = words[b], words[a]
    path.write_text(json.dumps(tree), encoding="utf-8")
    return []


def other_base(run: Path, there: Path) -> list[str]:
    path = there / "run" / "base" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] += 1e-3
    save_file(tensors, path, {"format": "pt"})
    return []


CHANGES: list[tuple[Callable[[Path, Path], list[str]], str, str]] = [
    (other_numbers, "data.train: found training texts other than in the checkpoint", "data, eval"),
    (other_order, "data.train: found training texts other than in the checkpoint", "data, eval"),
    (other_tokenizer, "model.tokenizer: found a tokenizer other than in the checkpoint", "tokenizer"),
    (other_base, "model.name_or_path: found a base model other than in the checkpoint", "base"),
]


def refusals(config: str, runs: list[list[str]]) -> list[str]:
    found = []
    for options in runs:
        with pytest.raises(UserError) as refused:
            train_on(load_config(config, options), as_rank())
        found.append(str(refused.value))
    return found


def test_a_changed_input_is_refused_by_name_and_changes_nothing(one_rank: Path, tmp_path: Path) -> None:
    runs, options = [], []
    for change, _, _ in CHANGES:
        runs.append((folder := tmp_path / change.__name__) / "run")
        set_back(one_rank, runs[-1], 3)
        options.append([f"run.dir={runs[-1]}", *change(one_rank, folder)])
    before = (runs[0] / "metrics.jsonl").read_bytes()
    said = run_ranks(refusals, 1, str(one_rank.parent / "config.yaml"), options)[0]
    for run, (change, words, accept), text in zip(runs, CHANGES, said, strict=True):
        assert words in text
        assert f"allowed: the same, or run.accept: [{accept}] to continue" in text
        assert (run / "metrics.jsonl").read_bytes() == before
        if change in (other_tokenizer, other_base):
            with pytest.raises(UserError, match=words):
                load_trained(run)


def test_moved_texts_count_as_the_same_input(one_rank: Path, tmp_path: Path) -> None:
    config = set_back(one_rank, tmp_path / "run", 5)
    shutil.copy(one_rank.parent / "texts.jsonl", tmp_path / "moved.jsonl")
    train_run(config, f"run.dir={tmp_path / 'run'}", f"data.train={tmp_path / 'moved.jsonl'}")
    assert losses(tmp_path / "run") == losses(one_rank)


def test_accepted_texts_begin_a_new_epoch_and_the_change_is_logged(one_rank: Path, tmp_path: Path) -> None:
    config = set_back(one_rank, tmp_path / "run", 3)  # at the beginning of epoch 1 of 3 steps each
    more = write_texts(tmp_path / "more.jsonl", 200, seed=5)
    options = [f"run.dir={tmp_path / 'run'}", f"data.train={more}"]
    train_run(config, *options, "run.accept=[data, eval]")
    (alarm,) = (json.loads(line) for line in (tmp_path / "run" / "alarms.jsonl").read_text().splitlines())
    assert (alarm["kind"], alarm["step"]) == ("exchanged-inputs", 3)
    assert "another data.train, data.eval" in alarm["text"]
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert state["loader"] == {"stage": 1, "epoch": 1, "step": 3}, "an epoch of the new texts has 14 steps"
    assert losses(tmp_path / "run")[:3] == losses(one_rank)[:3]
    assert losses(tmp_path / "run")[3] != losses(one_rank)[3]
    known = {name for name in metrics(tmp_path / "run")[-1] if name.startswith("eval/")}
    assert "eval/accuracy" in known
    assert not known & {"eval/base_accuracy", "eval/base_perplexity"}, "those are of the held-out texts before"

    with pytest.raises(AssertionError, match=r"run\.accept: \[data, eval\]"):  # the old ones are the strangers now
        train_run(config, options[0])


def test_a_warm_start_of_another_base_is_refused(one_rank: Path, tmp_path: Path) -> None:
    """Another seed builds another base; the file that names the newest checkpoint is as good as its folder."""
    same = [f"run.dir={tmp_path}/new", f"model.warm_start={one_rank}/latest", "train.seed=7", "stages.0.steps=1"]
    with pytest.raises(AssertionError, match=r"model\.name_or_path: found a base model other than in the checkpoint"):
        train_run(one_rank.parent / "config.yaml", *same)
    train_run(one_rank.parent / "config.yaml", *same, "stages.1.steps=1", "run.accept=[base]")
