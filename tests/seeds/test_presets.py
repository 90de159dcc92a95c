"""The literal presets set everything to the seeds' letter, and train."""

import json
import math
import random

import pytest
from support.runs import metrics, train_run, write_config

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.checkpoint.resume import load_checkpoint
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


def test_a_preset_begins_at_the_median_of_the_numbers_and_at_s1s_scale_where_asked(tmp_path):
    """S1 4.2: b_reg is the median, so the start is about as good as it; here W_reg z is some 1 of 1,000."""
    draw = random.Random(0)
    texts = [json.dumps({"text": f"tea costs {draw.uniform(900, 1100):.2f}."}) for _ in range(40)]
    (tmp_path / "texts.jsonl").write_text("\n".join(texts) + "\n")
    stages = [{"name": "words", "train": ["classifier"], "steps": 1, "lr": 1e-3}]
    train_run(write_config(tmp_path, start="seed", stages=stages, model__gamma_init=10.5, model__b_noise_init=0.5))
    start = json.loads((tmp_path / "run" / "start.json").read_text())
    saved = load_checkpoint(checkpoint_folder(tmp_path / "run", 1), (0, 2**62))
    assert float(saved.heads["action.reg_bias"]) == pytest.approx(start["statistics"]["median"], rel=1e-6)
    assert start["eval"]["dist/U_scale_median"] == pytest.approx(10.0, rel=1e-4), "S1 3.1 asks for 10, of U itself"
    assert start["eval"]["eval/reg_mdae"] == pytest.approx(start["eval"]["eval/baseline_mdae"], rel=0.1)
