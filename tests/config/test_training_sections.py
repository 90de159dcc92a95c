"""Stages, constraint, cache and adapters: what contradicts itself is refused by key, with the way out."""

from pathlib import Path

import pytest
import yaml

from cqwen_dist.config import Config, Ramp, UserError, changed_keys, load_config

TREE = {
    "model": {"name_or_path": "/base"},
    "data": {"train": "a.jsonl", "eval_fraction": 0.1},
    "loss": {"constraint": {"mode": False}},  # what YAML makes of a bare off
    "stages": [
        {"name": "a", "train": ["heads"], "until": {"max_steps": 10}, "reg_weight": {"start": 0, "end": 1}},
        {"name": "b", "train": ["lora"], "steps": 3},
    ],
}


def load(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(TREE))
    return load_config(path, overrides)


def test_training_sections_keep_the_given_values(tmp_path: Path) -> None:
    config = load(tmp_path, "loss.class_weights=frequency", "model.wide=[64, 16]")
    assert config.loss.constraint.mode == "off"
    assert config.model.wide_size == (64, 16)
    assert isinstance(config.stages[0].reg_weight, Ramp)
    assert config.stages[0].until is not None
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again) == config


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["stages.0.steps=3"], "stages.0.steps", "both steps and until"),
        (["data.eval_fraction=0.0"], "stages.0.until", "data.eval or data.eval_fraction"),
        (["stages.1.micro_batch_size=5"], "stages.1.micro_batch_size", r"global_batch_size \(32\)"),
        (["model.lora.dora=true", "parallel.zero_stage=3"], "model.lora.dora", "parallel.zero_stage 3"),
        (["model.wide=64", "start=seed"], "model.wide", "start calibrated"),
    ],
)
def test_wrong_training_settings_are_refused_by_key(tmp_path: Path, overrides: list[str], key: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as refusal:
        load(tmp_path, *overrides)
    assert refusal.value.key == key


def test_a_resumed_run_may_change_only_resumable_keys(tmp_path: Path) -> None:
    old = load(tmp_path)
    how = load(tmp_path, "stages.1.micro_batch_size=4", "train.feature_cache.mode=never")
    assert changed_keys(old, how) == []
    what = load(tmp_path, "stages.1.global_batch_size=16", "loss.constraint.eps=0.5")
    assert {key for key, _, _ in changed_keys(old, what)} == {"stages.1.global_batch_size", "loss.constraint.eps"}
