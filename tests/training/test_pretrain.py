"""Pretraining a small base: it learns, and the same config makes the same base."""

import json
import re
from pathlib import Path

import torch
from support.runs import cqwen_forked, train_run, write_config

from cqwen_dist.config import load_config
from cqwen_dist.data.load import tokenizer_of
from cqwen_dist.model.base_loading import load_base
from cqwen_dist.training.inputs import build_run_base


def built(folder: Path, *overrides: str) -> tuple[torch.nn.Module, list[str]]:
    folder.mkdir(exist_ok=True)
    said: list[str] = []
    config = load_config(write_config(folder), [*overrides])
    build_run_base(config, said.append, torch.device("cpu"), folder)
    return load_base(config.base_folder, torch.float32), said


def test_pretraining_learns_and_is_reproducible(tmp_path: Path) -> None:
    first, said = built(tmp_path / "a", "model.pretrain.steps=24")
    again, _ = built(tmp_path / "b", "model.pretrain.steps=24")
    other, _ = built(tmp_path / "c", "model.pretrain.steps=23")
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    losses = [float(line.rsplit(" ", 1)[1]) for line in said if "loss" in line]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4


def test_data_can_be_prepared_for_a_base_of_the_usual_size_before_the_run_builds_it(tmp_path: Path) -> None:
    """An architecture without vocab_size has its default, of which the trained tokenizer needs few rows."""
    architecture = {"model_type": "phi3", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    architecture |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    config = load_config(write_config(tmp_path, model__architecture=architecture))
    before = tokenizer_of(config)
    build_run_base(config, print, torch.device("cpu"), tmp_path / "none")
    assert tokenizer_of(config).digest() == before.digest()


def test_prepare_describes_the_data_and_a_run_uses_it(tmp_path: Path) -> None:
    config = write_config(tmp_path, data__cache_dir=str(tmp_path / "cache"), data__pack=True)
    done = cqwen_forked("prepare", config, "--json", "--workers", 1)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    folder = Path(found["folder"])
    assert {"summary.json", "train.arrow"} <= {path.name for path in folder.iterdir()}
    train = found["train"]
    assert train["texts"] == 32
    median, _, most = train["text_lengths"]
    assert 0 < median <= most < train["tokens"]
    assert train["numbers"] > 0
    assert 0 < train["tokens_per_sequence"] <= 1
    assert re.match(r"\[\[.*(costs <NUM -?\d+(\.\d+)?>|we have).*\.<\|endoftext\|>\]\]$", found["first_text"])
    stamp = (folder / "train.arrow").stat().st_mtime_ns
    train_run(config)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and path.name != "contents"] == [folder]
    assert (folder / "train.arrow").stat().st_mtime_ns == stamp
