"""Optimizer steps: sleeping and waking groups, a boundary against a loop written by hand, ranks and micro-batches."""

import json
import math
from pathlib import Path

import pytest
import torch
from support.numerics import assert_all_close
from support.runs import VOCAB, losses, metrics, train_run, write_config, write_texts
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.checkpoint.resume import TrainState, load_checkpoint
from cqwen_dist.checkpoint.trained import assemble, run_of
from cqwen_dist.config import Config, load_config
from cqwen_dist.data.load import load_datasets
from cqwen_dist.data.loader import Loader
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model import CausalQwenModel
from cqwen_dist.training.evaluation.evaluate_checkpoint import evaluate_checkpoint
from cqwen_dist.training.parameter_groups import Member, feature_members, head_members
from cqwen_dist.training.stages import Schedule, StagePlan

ALL = (0, 2**62)  # rows


def state_at(run: Path, step: int) -> TrainState:
    return load_checkpoint(checkpoint_folder(run, step), ALL)


def tensors_of(state: TrainState, group: str) -> dict[str, Tensor]:
    """Parameters and moments of a group out of a checkpoint."""
    parts = {
        "lora": [".lora_"],
        "embedding": ["embedding."],
        "classifier": ["action.cls_weight"],
        "thresholds": ["action.threshold"],
        "abduction": ["abduction."],
        "regression": ["action.reg_"],
        "noise": ["action.b_noise"],
    }[group]
    every = {
        **state.features,
        **state.feature_moments,
        **state.heads,
        **state.head_moments,
        **state.rows,
        **state.row_moments,
    }
    return {name: value for name, value in every.items() if any(part in name for part in parts)}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert a
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def test_adapters_train_only_from_the_second_stage_on(one_rank: Path) -> None:
    first, third, last = (tensors_of(state_at(one_rank, step), "lora") for step in (1, 3, 6))
    assert same_bits(first, third)
    assert all(not value.any() for name, value in third.items() if "exp_avg" in name or "lora_B" in name)
    assert not any(torch.equal(third[name], last[name]) for name in last if "lora_B" in name)


def test_frozen_groups_are_unchanged_to_the_bit_and_start_fresh(tmp_path: Path) -> None:
    groups = [["heads", "embedding"], ["lora", "noise"], ["embedding", "abduction", "lora"]]
    stages = [{"name": f"s{i}", "train": train, "steps": 2, "lr": 1e-2} for i, train in enumerate(groups)]
    config = write_config(tmp_path, stages=stages, train__checkpoint_every=1, train__keep_checkpoints=9)
    train_run(config)
    run = tmp_path / "run"
    before, slept, woken, last = (state_at(run, step) for step in (2, 4, 5, 6))
    for group in ("embedding", "abduction", "classifier", "thresholds", "regression"):
        assert same_bits(tensors_of(before, group), tensors_of(slept, group)), f"{group} moved in its sleep"
    for group in ("lora", "noise"):
        assert not same_bits(tensors_of(before, group), tensors_of(slept, group)), (
            f"{group} was trainable and did not move"
        )
    for group in ("classifier", "thresholds", "regression", "noise"):
        assert same_bits(tensors_of(slept, group), tensors_of(last, group)), f"{group} moved in its sleep"
    assert woken.state["feature_steps"] == {"embedding": 1, "lora": 3}
    assert woken.state["head_steps"]["abduction.loc_net.weight"] == 1
    # One Adam step from zero moments: exp_avg is (1 - beta1) g, exp_avg_sq (1 - beta2) g^2.
    moments = tensors_of(woken, "embedding")
    for name, first in moments.items():
        if name.endswith(".exp_avg"):
            assert torch.allclose((first / 0.1) ** 2 * 0.001, moments[name + "_sq"], rtol=1e-4, atol=1e-20)


def loader_of(config: Config, rank: int = 0, world: int = 1, micro_batch_size: int = 100) -> Loader:
    tokenizer = NumericalAwareTokenizer.from_pretrained(config.tokenizer_source, None, VOCAB)
    return Loader(
        load_datasets(config.data, tokenizer).train,
        rank=rank,
        world=world,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=micro_batch_size,
        seed=config.train.seed,
    )


def plain_loss(model: CausalQwenModel, batch: Batch) -> Tensor:
    """L_cls + L_reg as the seeds' formulas read, [B,T,V] and all (calibrated: alpha 0, stop, slopes up to 1)."""
    loc_s, scale_s, loc_y, scale_y = model(batch.input_ids, batch.numeric_values, batch.attention_mask)
    keep = batch.labels >= 0
    gap = loc_s - model.action.threshold
    gap.register_hook(lambda slope: slope.clamp(-1 / keep.sum(), 1 / keep.sum()))
    p = 0.5 + torch.atan(gap / scale_s) / math.pi
    target = torch.nn.functional.one_hot(batch.labels.clamp(min=0), VOCAB).float()
    words = torch.nn.functional.binary_cross_entropy(p[keep], target[keep], reduction="sum") / keep.sum()
    number = batch.numeric_mask
    goal = model.target.forward(batch.numeric_labels)
    nll = torch.log(math.pi * scale_y) + torch.log1p(((goal - loc_y) / scale_y) ** 2)
    gated = (p[..., model.config.num_token_id].detach() * nll)[number].sum() / number.sum()
    return words + gated


class HandLoop:
    """One AdamW over named parameters, its state taken from a checkpoint; the loop a textbook would write."""

    def __init__(self, model: CausalQwenModel, state: TrainState, config: Config) -> None:
        heads = torch.nn.ModuleDict({"abduction": model.abduction, "action": model.action})
        self.model, self.unit = model, state.state["noise_unit"]
        self.members: list[Member] = [*feature_members(model.features), *head_members(heads)]
        model.requires_grad_(False)
        self.adamw = torch.optim.AdamW([{"params": [m.parameter], "weight_decay": 0.0} for m in self.members])
        moments = {**state.feature_moments, **state.head_moments, **state.row_moments}
        for m in self.members:
            count = state.state["head_steps"].get(m.name, state.state["feature_steps"].get(m.group))
            if count:
                exp = {key: moments[f"{m.name}.{key}"] for key in ("exp_avg", "exp_avg_sq")}
                self.adamw.state[m.parameter] = {"step": torch.tensor(float(count)), **exp}

    def step(self, batch: Batch, plan: StagePlan, step: int) -> float:
        for m, group in zip(self.members, self.adamw.param_groups, strict=True):
            m.parameter.requires_grad_(m.group in plan.stage.groups)
            group["lr"] = plan.lr(m.group, m.is_scale, step, self.unit if m.group == "noise" else 1.0)
        loss = plain_loss(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([m.parameter for m in self.members if m.parameter.grad is not None], 1.0)
        self.adamw.step()
        self.adamw.zero_grad()
        return float(loss.detach())


def test_a_two_stage_run_equals_a_hand_written_loop(tmp_path: Path) -> None:
    """Clipped at a norm of 1, as the loop does: these norms are larger."""
    whole = {"train__micro_batch_size": 12, "train__checkpoint_every": 1, "train__keep_checkpoints": 9}
    train_run(write_config(tmp_path, train__max_grad_norm=1.0, **whole))
    run = tmp_path / "run"
    assert all(record["train/grad_norm"] > 1.0 for record in metrics(run))
    config, folder = run_of(checkpoint_folder(run, 1))
    state = load_checkpoint(folder, ALL)
    model = assemble(state, config).model
    hand = HandLoop(model, state, config)
    loader = loader_of(config)
    loader.load_state_dict(state.state["loader"])
    schedule = Schedule(config.stages, loader.steps_per_epoch)
    found = []
    for step, (batch,) in zip(range(1, 6), loader, strict=False):
        found.append(hand.step(batch, schedule.at(step), step))
    # AdamW divides by the root of what may be small: a rounding of such a gradient is a larger part of a step
    assert found == pytest.approx(losses(run)[1:], rel=1e-4)
    end = state_at(run, 6)
    saved = {**end.features, **end.heads, **end.rows}
    assert_all_close({m.name: m.parameter for m in hand.members}, {m.name: saved[m.name] for m in hand.members}, 1e-3)


def test_two_ranks_give_the_losses_of_one(one_rank: Path, two_ranks: Path) -> None:
    config = load_config(two_ranks / "config.yaml")
    for step, (mine, other) in zip(
        range(6), zip(loader_of(config, 0, 2), loader_of(config, 1, 2), strict=False), strict=False
    ):
        numbers = [sum(int(batch.numeric_mask.sum()) for batch in part) for part in (mine, other)]
        assert numbers[0] != numbers[1], f"step {step}: the test wants unequal numbers of <NUM> per rank"
    assert losses(two_ranks) == pytest.approx(losses(one_rank), rel=1e-5)
    assert metrics(two_ranks)[-1]["eval/reg_mdae"] == pytest.approx(metrics(one_rank)[-1]["eval/reg_mdae"], rel=1e-4)


def test_accumulation_does_not_change_the_losses(one_rank: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, train__micro_batch_size=3)
    train_run(config)
    assert losses(tmp_path / "run") == pytest.approx(losses(one_rank), rel=1e-5)
    assert metrics(tmp_path / "run")[-1]["train/accuracy"] == metrics(one_rank)[-1]["train/accuracy"]


@torch.no_grad()
def test_train_accuracy_covers_every_token_of_the_step(one_rank: Path, two_ranks: Path) -> None:
    """S3 5.2. argmax P over the used rows, by the model as it was before the step."""
    config, folder = run_of(checkpoint_folder(one_rank, 5))
    state = load_checkpoint(folder, ALL)
    model = assemble(state, config).model
    loader = loader_of(config)
    loader.load_state_dict(state.state["loader"])
    (batch,) = next(iter(loader))
    loc_s, scale_s, _, _ = model(batch.input_ids, batch.numeric_values, batch.attention_mask)
    strength = ((loc_s - model.action.threshold) / scale_s)[..., : model.config.used_rows]
    expected = (strength.argmax(-1) == batch.labels)[batch.labels >= 0].double().mean()
    assert expected > 0
    for run in (one_rank, two_ranks):
        assert metrics(run)[-1]["train/accuracy"] == pytest.approx(float(expected), rel=1e-6)


OPTIONS = {
    "class weights, signed logarithms": [
        *("loss.class_weights={5: 2.0, 289: 0.5}", "loss.target_transform=signed_log"),
        *("model.architecture.vocab_size=401", "model.lora.dora=true", "loss.constraint.mode=dual"),
    ],
    "smaller U, ZeRO-3": [
        *("model.causal_size=12", "start=seed-100"),
        *("model.gradient_checkpointing=true", "parallel.zero_stage=3", "train.weight_decay=0.1"),
    ],
}


@pytest.mark.parametrize("options", [pytest.param(options, id=name) for name, options in OPTIONS.items()])
def test_two_ranks_sharing_the_vocabulary_train_as_one_with_any_options(tmp_path: Path, options: list[str]) -> None:
    config = write_config(tmp_path)
    train_run(config, *options)
    train_run(config, *options, f"run.dir={tmp_path}/two", "parallel.vocab_group_size=2", world=2)
    alone = losses(tmp_path / "run")
    assert losses(tmp_path / "two") == pytest.approx(alone, rel=1e-5)
    assert alone[-1] != alone[0]
    both = [evaluate_checkpoint(tmp_path / name, None)["eval/cls_loss_mean"] for name in ("run", "two")]
    assert both[0] == pytest.approx(metrics(tmp_path / "run")[-1]["eval/cls_loss_mean"], rel=1e-5)
    assert both[1] == pytest.approx(both[0], rel=1e-4)


def test_a_rank_without_any_sequence_changes_nothing(tmp_path: Path) -> None:
    config = write_config(tmp_path, train__global_batch_size=1, train__micro_batch_size=1)
    train_run(config)
    train_run(config, f"run.dir={tmp_path}/two", world=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "run"), rel=1e-5)


def test_data_without_numbers_has_a_regression_loss_of_zero(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts.jsonl", numbers=False)
    train_run(write_config(tmp_path), world=2)
    records = metrics(tmp_path / "run")
    assert len(records) == 6
    for record in records:
        assert record["train/reg_loss_effective"] == 0.0
        assert all(math.isfinite(value) for value in record.values() if isinstance(value, float))
    assert records[-1]["train/total_loss"] < records[0]["train/total_loss"]


def test_the_words_loss_of_an_evaluation_has_the_heads_decisions_as_training(tmp_path: Path) -> None:
    """Which of the earlier numbers it is: the first step and the evaluation before it agree."""
    rows = [f"{('tea', 'milk', '2 salts')[i % 3]},{20 + i * 7 % 10}.25,{20 + i * 7 % 10}.25" for i in range(12)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["item,price,again", *rows]) + "\n")
    data = {"data__train": str(table), "data__eval": str(table), "data__eval_fraction": 0.0}
    data |= {"data__text_template": "{item} costs {price}, again {again}", "model__candidates": "arithmetic"}
    one_step = {"stages": [{"name": "heads", "train": ["heads"], "steps": 1}], "train__global_batch_size": 12}
    train_run(write_config(tmp_path, **data, **one_step))
    start = json.loads((tmp_path / "run" / "start.json").read_text())["eval"]
    assert start["eval/cls_loss_mean"] == pytest.approx(metrics(tmp_path / "run")[0]["train/cls_loss_mean"], rel=1e-4)


def test_ranks_and_vocabulary_groups_score_computed_candidates_as_one(tmp_path: Path) -> None:
    texts = [
        f"tea {a} cups and {b} more make {a} + {b} = {a + b}, twice {(a + b) * 2}" for a in (3, 5, 8) for b in range(4)
    ]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    asked = {"data__train": str(data), "data__eval_fraction": 0.0, "model__candidates": "arithmetic"}
    config = write_config(tmp_path, **asked)
    train_run(config)
    both = ["parallel.vocab_group_size=2", "parallel.zero_stage=3", f"run.dir={tmp_path}/two"]
    train_run(config, *both, world=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "run"), rel=1e-5)
    one, two = (
        {name: value for name, value in state_at(tmp_path / run, 6).heads.items() if "candidate" in name}
        for run in ("run", "two")
    )
    assert len(one) == 5
    assert all(value.any() for value in one.values())
    assert_all_close(two, one, 1e-4)  # AdamW divides by the gradient's size, which is rounded otherwise
