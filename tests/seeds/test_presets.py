"""The literal presets set everything to the seeds' letter, and train."""

import math

import pytest
from support.runs import metrics, train_run, write_config

from cqwen_dist.config import load_config


@pytest.mark.parametrize("start", ["seed", "seed-100"])
def test_a_preset_trains_a_hundred_steps_without_nan(start, tmp_path):
    config = write_config(
        tmp_path,
        start=start,
        stages=[
            {"name": "heads", "train": ["heads", "embedding"], "steps": 50, "lr": 1e-3},
            {"name": "lora", "train": ["heads", "embedding", "lora"], "steps": 50, "lr": 1e-3},
        ],
        train__eval_every=50,
        train__checkpoint_every=100,
        run__dir=str(tmp_path / "run"),
    )
    train_run(config)
    records = metrics(tmp_path / "run")
    losses = [record["train/total_loss"] for record in records]
    assert len(losses) == 100
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-10:]) < sum(losses[:10])


@pytest.mark.parametrize("start", ["seed", "seed-100", "calibrated"])
def test_a_preset_is_the_letter_in_every_key(start, tmp_path):
    """No number dimensions and raw targets for the seeds' (D-number-dims, D35); both for the calibrated."""
    config = load_config(write_config(tmp_path, start=start), [])
    literal = start != "calibrated"
    assert (config.number_dims == 0) == literal
    assert config.target_transform == ("none" if literal else "standardise")
