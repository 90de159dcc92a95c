"""A run goes on with the inputs that it was trained with; another is refused by its key, or accepted by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runs import cqwen_forked, losses, metrics, set_back, train_run, write_texts

from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import UserError


def texts_of(run: Path) -> list[str]:
    return (run.parent / "texts.jsonl").read_text(encoding="utf-8").splitlines()


def data(change: Callable[[list[str]], list[str]]) -> Callable[[Path, Path], list[str]]:
    def write(run: Path, there: Path) -> list[str]:
        path = there / "other.jsonl"
        path.write_text("\n".join(change(texts_of(run))) + "\n", encoding="utf-8")
        return [f"data.train={path}"]

    return write


def thousandfold(lines: list[str]) -> list[str]:
    return [line.replace(".", "000.") for line in lines]


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


CHANGES: dict[str, tuple[Callable[[Path, Path], list[str]], str, str]] = {
    "numbers": (data(thousandfold), "data.train: found training texts other than in the checkpoint", "data, eval"),
    "order": (
        data(lambda lines: lines[::-1]),
        "data.train: found training texts other than in the checkpoint",
        "data, eval",
    ),
    "fewer": (
        data(lambda lines: lines[:14]),
        "data.train: found training texts other than in the checkpoint",
        "data, eval",
    ),
    "tokenizer": (
        other_tokenizer,
        "model.tokenizer: found a tokenizer other than in the checkpoint",
        "tokenizer",
    ),
    "base": (other_base, "model.name_or_path: found a base model other than in the checkpoint", "base"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_changed_input_is_refused_by_name_and_changes_nothing(one_rank: Path, tmp_path: Path, kind: str) -> None:
    change, said, accept = CHANGES[kind]
    config = set_back(one_rank, tmp_path / "run", 3)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    options = change(one_rank, tmp_path)
    done = cqwen_forked("train", config, f"run.dir={tmp_path / 'run'}", *options)
    assert done.returncode == 2, done.stderr[-2000:]
    assert said in done.stderr
    assert f"allowed: the same, or run.accept: [{accept}] to go on" in " ".join(done.stderr.split())
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    if kind in ("tokenizer", "base"):
        with pytest.raises(UserError, match=said):
            load_trained(tmp_path / "run")


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

    # The checkpoint holds the new texts' digest now: the old ones are the strangers.
    done = cqwen_forked("train", config, options[0])
    assert done.returncode == 2
    assert "run.accept: [data, eval]" in " ".join(done.stderr.split())


def test_a_warm_start_of_another_base_is_refused(one_rank: Path, tmp_path: Path) -> None:
    same = ["run.dir=" + str(tmp_path / "new"), f"model.warm_start={one_rank}"]
    done = cqwen_forked("train", one_rank.parent / "config.yaml", *same, "train.seed=7")
    assert done.returncode == 2, "another seed builds another base"
    assert "model.name_or_path: found a base model other than in the checkpoint" in done.stderr
    torch.manual_seed(0)
    same[1] += "/latest"  # the file that names the newest checkpoint is as good as its folder
    accepted = cqwen_forked("train", one_rank.parent / "config.yaml", *same, "train.seed=7", "run.accept=[base]")
    assert accepted.returncode == 0, accepted.stderr
