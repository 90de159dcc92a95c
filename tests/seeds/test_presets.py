"""The literal presets set everything to the seeds' letter, and train."""

import json
import math
import random

import pytest
import torch
from support.ranks import run_ranks
from support.runs import as_rank, metrics, train_run, write_config
from support.tiny import random_batch, tiny_model

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.checkpoint.resume import load_checkpoint
from cqwen_dist.config import Config, load_config
from cqwen_dist.data.dataset import TextDataset
from cqwen_dist.heads.abduction import AbductionNetwork
from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.model import causal_qwen
from cqwen_dist.model.initialise import SEED_GAMMA, SEED_NOISE, set_scales, start_at_data
from cqwen_dist.training.train import train_on


@pytest.mark.parametrize("start", ["seed", "seed-100"])
def test_a_preset_trains_without_nan(start, tmp_path):
    config = write_config(
        tmp_path,
        start=start,
        stages=[
            {"name": "heads", "train": ["heads", "embedding"], "steps": 10, "lr": 1e-3},
            {"name": "lora", "train": ["heads", "embedding", "lora"], "steps": 10, "lr": 1e-3},
        ],
        train__checkpoint_every=100,
        run__dir=str(tmp_path / "run"),
    )
    train_run(config)
    records = metrics(tmp_path / "run")
    losses = [record["train/total_loss"] for record in records]
    assert len(losses) == 20
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-5:]) < sum(losses[:5])


SETTINGS = {
    "seeds": {
        "calibrated": False,
        "number_dims": 0,  # D-number-dims
        "w_num_scale": 1.0,  # D24
        "num_row_init": "inherit",  # D-numeral
        "max_grad_norm": 1.0,  # D-clip
        "word_terms": {"slope_limit": 0.0, "softmax_weight": 0.0},  # D-slope, D-softmax
        "target_transform": "none",  # D35
        "constraint": "monitor",  # D31
        "kl_bounded": False,
        "policy": False,  # D-digits
        "candidates": "none",  # D-candidates
    },
    "calibrated": {
        "calibrated": True,
        "number_dims": 8,
        "w_num_scale": None,
        "num_row_init": "digits",
        "max_grad_norm": None,
        "word_terms": {"slope_limit": 1.0, "softmax_weight": 3.0},
        "target_transform": "standardise",
        "constraint": "dual",
        "kl_bounded": True,
        "policy": True,
        "candidates": "arithmetic",
    },
}


@pytest.mark.parametrize("start", ["seed", "seed-100", "calibrated"])
def test_a_preset_sets_every_key_as_written(start, tmp_path):
    """Every property of a config that `start` decides, of a base that never saw <NUM>. (C, gamma_0 and b_noise are the
    heads': test_presets_are_the_seeds_constants.)"""
    path = tmp_path / "config.yaml"
    path.write_text("model: {name_or_path: x}\ndata: {train: a}\n")
    properties = [name for name, value in vars(Config).items() if isinstance(value, property) and name[0] != "_"]
    config, other = (
        load_config(path, [f"start={name}"]) for name in (start, "seed" if start == "calibrated" else "calibrated")
    )
    decided = {name: getattr(config, name) for name in properties if getattr(config, name) != getattr(other, name)}
    decided["constraint"], decided["policy"] = decided["constraint"].mode, decided["policy"].digits
    assert decided == SETTINGS["calibrated" if start == "calibrated" else "seeds"]
    assert config.loss.reg_weight == 1.0  # D37, at every start


def _order(config):
    """What a start does, in the order of each kind's first event."""
    events = []

    def told(owner, name, event):
        original = getattr(owner, name)

        def telling(*args, **options):
            events.append(event)
            return original(*args, **options)

        setattr(owner, name, telling)  # this rank's process ends with the run

    told(TextDataset, "statistics", "statistics")
    told(AbductionNetwork, "reset", "abduction")
    told(ActionNetwork, "reset", "action")
    told(causal_qwen, "inherit_head", "action")
    told(causal_qwen, "inject_lora", "the rest")
    train_on(load_config(config), as_rank())
    return list(dict.fromkeys(events))


def test_the_start_initialises_in_the_seeds_order(tmp_path):
    """S1 1.2. The statistics come first: b_reg and the target's unit are made of them."""
    stages = [{"name": "all", "train": ["heads", "lora"], "steps": 1, "lr": 1e-3}]
    config = write_config(tmp_path, start="seed", stages=stages)
    assert run_ranks(_order, 1, str(config)) == [["statistics", "abduction", "action", "the rest"]]


def test_a_preset_starts_at_the_median_and_half_the_quartiles_distance(tmp_path):
    """S1 4.2: b_reg is the median, so the start is about as good as it, and ||W_reg|| gamma is IQR/2."""
    draw = random.Random(0)
    texts = [json.dumps({"text": f"tea costs {draw.uniform(900, 1100):.2f}."}) for _ in range(40)]
    (tmp_path / "texts.jsonl").write_text("\n".join(texts) + "\n")
    stages = [{"name": "words", "train": ["classifier"], "steps": 1, "lr": 1e-3}]
    train_run(write_config(tmp_path, start="seed", stages=stages))
    start = json.loads((tmp_path / "run" / "start.json").read_text())
    saved = load_checkpoint(checkpoint_folder(tmp_path / "run", 1), (0, 2**62))
    assert float(saved.heads["action.reg_bias"]) == pytest.approx(start["statistics"]["median"], rel=1e-6)
    half = start["statistics"]["scale"]
    weight = saved.heads["action.reg_weight"].abs().sum()
    assert float(weight) * (SEED_GAMMA + SEED_NOISE) == pytest.approx(half, rel=1e-4), "scale_Y of the start"
    assert start["eval"]["eval/reg_mdae"] == pytest.approx(start["eval"]["eval/baseline_mdae"], rel=0.1)


@torch.no_grad()
def test_a_scale_of_ten_is_u_s_own_and_the_numbers_still_start_at_the_data():
    """S1 3.1 asks for 10, of U itself; S1 4.2 for IQR/2, of Y."""
    model, batch = tiny_model(start="seed"), random_batch()
    set_scales(model, 10.0, 0.5)
    start_at_data(model, torch.tensor(7.0, dtype=torch.float64), 2.5)
    u = model.infer(batch.input_ids, batch.numeric_values)
    assert float(u.scale.median()) == pytest.approx(10.0, rel=1e-5)
    *_, scale_y = model(batch.input_ids, batch.numeric_values, batch.attention_mask)
    assert float(scale_y.median()) == pytest.approx(2.5, rel=1e-5)
    assert float(model.action.reg_bias) == 7.0
