"""What goes wrong while training: nothing that is not finite enters a parameter, and the run says where it stood."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.runs import as_rank, cqwen_forked, metrics, write_config, write_texts
from torch import Tensor

from cqwen_dist.checkpoint.manifest import latest_checkpoint
from cqwen_dist.config import load_config
from cqwen_dist.run.status import read_status
from cqwen_dist.training.telemetry.alarms import Alarm, Alarms, Refusals
from cqwen_dist.training.zero.engine import NonFiniteStep


def entered(path: str, stage: int) -> tuple[Any, Any, Any]:
    """A run that has begun a stage, its plan and its batches."""
    from cqwen_dist.run.folder import open_run
    from cqwen_dist.training.assembly import build_run, groups_of
    from cqwen_dist.training.start import begin

    config, runtime = load_config(path), as_rank()
    if runtime.is_main:
        open_run(config)
    dist.barrier()
    run = build_run(config, runtime, groups_of(config, runtime))
    begin(run)
    plan = run.schedule.plans[stage]
    run.enter_stage(plan, fresh=True)
    run.engine.set_lr(plan, plan.start)
    return run, plan, run.loaders.enter(plan)


def refused_steps(path: str, stage: int) -> list[tuple[str, list[str]]]:
    """A step whose last rank meets a NaN, one whose loss is infinite there with a finite gradient: what is raised, and
    what has changed."""
    from cqwen_dist.training.zero.engine import NonFiniteStep

    run, plan, batches = entered(path, stage)
    last = run.runtime.rank == run.runtime.world_size - 1
    figures, _ = run.stepper(next(batches), plan, plan.start)
    assert 0 < float(figures["train/grad_norm"]) < float("inf")
    found, whole = [], run.stepper._loss
    for kind in ("nan", "infinite"):
        batch = next(batches)
        if last and kind == "nan":
            batch[-1].numeric_values[0, 0] = torch.nan
            batch[-1].input_ids[0, 0] = run.model.config.num_token_id
        elif last:
            run.stepper._loss = lambda *a: replace(terms := whole(*a), loss=terms.loss + torch.inf)
        before = everything(run)
        with pytest.raises(NonFiniteStep) as refused:
            run.stepper(batch, plan, plan.start + 1)
        after = everything(run)
        assert before.keys() == after.keys()
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        found.append((str(refused.value), changed))
    return found


def everything(run: object) -> dict[str, Tensor]:
    """Every parameter and moment that training moves, copied."""
    from cqwen_dist.training.state import head_tensors

    engine = run.engine  # type: ignore[attr-defined]
    parameters, moments, _ = engine.feature_state()
    head_moments, _ = engine.heads.moments()
    named = {**parameters, **moments, **head_moments, **head_tensors(engine)}
    return {name: value.detach().clone() for name, value in named.items()}


def steps_around(path: str, poison: bool) -> dict[str, np.ndarray]:
    """A step, one that is refused (or none), a step: everything after it."""
    from cqwen_dist.training.zero.engine import NonFiniteStep

    run, plan, batches = entered(path, 1)
    runtime = run.runtime
    first, second = next(batches), next(batches)
    run.stepper(first, plan, plan.start)
    if poison:
        bad = [replace(batch, numeric_values=batch.numeric_values.clone()) for batch in first]
        if runtime.rank == runtime.world_size - 1:
            bad[0].numeric_values[0, 0] = torch.nan  # phi(nan) at any token
        with pytest.raises(NonFiniteStep) as refused:
            run.stepper(bad, plan, plan.start + 1)
        assert refused.value.ranks == [runtime.world_size - 1]
    run.stepper(second, plan, plan.start + 1)
    return {name: value.cpu().numpy() for name, value in everything(run).items()}


@pytest.mark.parametrize(
    ("zero", "precision", "offload"),
    [(3, "fp32", "none"), pytest.param(2, "bf16", "optimizer", marks=pytest.mark.slow)],
)
def test_a_refused_step_does_not_affect_the_next_one(tmp_path: Path, zero: int, precision: str, offload: str) -> None:
    """Nothing of the refused gradients is left: not in the heads, and not in DeepSpeed's buffers."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    options = {"parallel__zero_stage": zero, "parallel__offload": offload, "train__precision": precision}
    options["data__train"] = str(write_texts(tmp_path / "texts.jsonl"))
    results = [
        run_ranks(steps_around, 2, str(write_config(tmp_path / name, **options)), poison)
        for name, poison in (("a", False), ("b", True))
    ]
    for without, after in zip(*results, strict=True):
        assert without.keys() == after.keys()
        changed = [name for name in without if not np.array_equal(without[name], after[name])]
        assert changed == []


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (1, "fp32")])
def test_what_is_not_finite_on_one_rank_is_refused_on_all_ranks(tmp_path: Path, stage: int, precision: str) -> None:
    config = write_config(tmp_path, train__precision=precision, train__micro_batch_size=3)
    for nan, infinite in run_ranks(refused_steps, 2, str(config), stage):
        assert "features of rank 1 are not finite" in nan[0]
        assert "all features are finite" in infinite[0]
        assert nan[1] == infinite[1] == []


def test_a_diverging_run_skips_steps_logs_them_and_ends_with_code_1(tmp_path: Path) -> None:
    """Steps 5 and 6 are passed over; step 7 is the third in a row."""
    config = write_config(tmp_path, stages__1__lr_groups={"lora": 1e30}, stages__1__steps=9)
    done = cqwen_forked("train", config)
    run = tmp_path / "run"
    assert done.returncode == 1
    status = read_status(run)
    assert status["status"] == "fatal"
    assert "step 7, stage lora" in status["reason"]
    cause, _, reason = status["reason"].partition(": ")
    assert cause == "a loss that is not finite"
    assert reason in done.stderr
    assert "refused-step" in (run / "report.html").read_text(), "a run that fails leaves its report too"
    records = metrics(run)
    assert [r["step"] for r in records if "train/refused" not in r] == [1, 2, 3, 4], "every step taken is logged"
    assert [r["step"] for r in records if r.get("train/refused") and "train/total_loss" not in r] == [5, 6]
    alarms = [json.loads(line) for line in (run / "alarms.jsonl").read_text().splitlines()]
    assert [(alarm["step"], alarm["kind"]) for alarm in alarms] == [(5, "refused-step"), (6, "refused-step")]
    dataset = 32  # 40 texts, a fifth held out
    for alarm in alarms:
        assert len(alarm["samples"]) in (12, dataset % 12)
        assert all(0 <= sample < dataset for sample in alarm["samples"])
    folder = latest_checkpoint(run)
    assert folder is not None
    assert folder.name == "step-00000006", "a refused step changes nothing, so it may be saved"


def test_bf16_trains_and_keeps_the_heads_in_fp32(tmp_path: Path) -> None:
    steps = {f"stages__{i}__steps": 8 for i in (0, 1)}
    config = write_config(tmp_path, train__precision="bf16", train__checkpoint_every=8, **steps)
    done = cqwen_forked("train", config)
    assert done.returncode == 0, done.stderr
    records = metrics(tmp_path / "run")
    losses = [record["train/total_loss"] for record in records]
    assert all(abs(value) < 1e4 for value in losses)
    assert sum(losses[-3:]) < 0.96 * sum(losses[:3])
    folder = latest_checkpoint(tmp_path / "run")
    assert folder is not None
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == 16
    from cqwen_dist.checkpoint.resume import load_checkpoint

    saved = load_checkpoint(folder, (0, 2**62))
    for part in (saved.features, saved.heads, saved.rows, saved.row_moments):
        assert {value.dtype for value in part.values()} == {torch.float32}
    reg_bias = saved.heads["action.reg_bias"]
    assert not torch.equal(reg_bias, reg_bias.bfloat16().float()), "rounded to bf16 somewhere"


def groups_while_a_signal_may_end_a_rank(path: str) -> tuple[list[bool], int]:
    """Of each process group of a run, whether a signal could end this rank alone while it was made; the run's steps."""
    from cqwen_dist.training.train import train_on

    config, runtime = load_config(path), as_rank()
    made: list[bool] = []
    make = dist.distributed_c10d._new_process_group_helper

    def noted(*arguments: Any, **named: Any) -> Any:
        made.append(runtime.stop._interrupt)
        return make(*arguments, **named)

    dist.distributed_c10d._new_process_group_helper = noted
    train_on(config, runtime)
    return made, len(metrics(Path(config.run.dir)))


def test_no_group_is_made_while_a_signal_may_end_a_rank_alone(tmp_path: Path) -> None:
    """To make a group, torch waits in the store for each rank, where it does not see that one has left."""
    config = write_config(tmp_path, parallel__zero_stage=3, stages__0__steps=1, stages__1__steps=1)
    for made, steps in run_ranks(groups_while_a_signal_may_end_a_rank, 2, str(config)):
        assert (any(made), steps) == (False, 2)
        assert len(made) >= 4, "the run made no groups: the test watches the wrong function"


def one_rank_rounds_otherwise(path: str) -> list[int]:
    """The steps that a rank evaluates in a stage that ends without improvement; only rank 0's figures improve."""
    from cqwen_dist.training.run_parts import Evaluations
    from cqwen_dist.training.train import train_on

    evaluate, steps = Evaluations.__call__, []

    def rounded(self: Evaluations, step: int, stage: str) -> dict[str, Any]:
        steps.append(step)
        return evaluate(self, step, stage) | {"eval/cls_loss_mean": 1.0 - (dist.get_rank() == 0) * step * 1e-15}

    Evaluations.__call__ = rounded  # type: ignore[method-assign]
    train_on(load_config(path), as_rank())
    return steps


def test_ranks_end_a_stage_together_though_their_figures_differ_in_the_last_bit(tmp_path: Path) -> None:
    until = {"max_steps": 4, "patience": 1}
    stages = [{"name": "heads", "train": ["heads", "embedding"], "lr": 1e-2, "until": until}]
    config = write_config(tmp_path, stages=stages, train__eval_every=1, train__checkpoint_every=9)
    assert run_ranks(one_rank_rounds_otherwise, 2, str(config), timeout=60) == [[0, 1, 2, 3, 4]] * 2


V = 1000


def record(step: int, stage: str = "heads", **train: float) -> dict[str, Any]:
    return {"step": step, "stage": stage, **{f"train/{name}": value for name, value in train.items()}}


def run(alarms: Alarms, records: list[dict[str, Any]]) -> list[Alarm]:
    return [alarm for r in records for alarm in alarms.look(r, samples=range(r["step"], r["step"] + 3))]


def trapped(step: int, **changes: float) -> dict[str, Any]:
    return record(
        step, **{"cls_loss_mean": 1 + math.log(V), "prob_sum_mean": 1.02, "accuracy": 0.002, **changes}
    )  # fmt: skip


def test_the_uniform_solution_is_reported_once_though_its_loss_is_low() -> None:
    alarms = Alarms(V, base_accuracy=0.4)
    found = run(alarms, [trapped(step) for step in range(1, 30)])
    assert [(a.kind, a.step) for a in found] == [("uniform-trap", 3)]


@pytest.mark.parametrize("changes", [{"accuracy": 0.3}, {"prob_sum_mean": 40.0}, {"cls_loss_mean": 5.0}])
def test_a_similar_healthy_run_raises_no_alarm(changes: dict[str, float]) -> None:
    assert run(Alarms(V, base_accuracy=0.4), [trapped(step, **changes) for step in range(1, 30)]) == []


def test_a_loss_spike_names_step_and_samples_but_a_new_stage_is_no_spike() -> None:
    draw = random.Random(0)
    calm = [record(s, total_loss=5 - s / 100 + draw.gauss(0, 0.1)) for s in range(1, 100)]
    assert run(Alarms(V), calm) == []
    found = run(Alarms(V), [*calm[:60], record(61, total_loss=9.0), *calm[61:]])
    assert [(a.kind, a.step, a.samples) for a in found] == [("loss-spike", 61, [61, 62, 63])]
    later = [record(s, "lora", total_loss=50.0 + draw.gauss(0, 0.1)) for s in range(100, 140)]
    assert run(Alarms(V), [*calm, *later]) == []


@pytest.mark.parametrize(
    ("held", "advice", "first"), [(False, "loss.constraint.mode: dual", 2), (True, "lower the rates", 4)]
)
def test_a_kl_above_its_bound_is_told(held: bool, advice: str, first: int) -> None:
    """If it is held, not by one batch's scatter; between measurements nothing changes."""

    def at(*kls: float | None) -> list[dict[str, Any]]:
        known = [{} if kl is None else {"kl": kl, "kl_eps": 0.1} for kl in kls]
        return [record(step, **found) for step, found in enumerate(known, 1)]

    assert run(Alarms(V, kl_held=held), at(0.0, 0.05, 0.1, 0.09, 0.1, 0.12 if held else 0.1)) == []
    (alarm,) = run(Alarms(V, kl_held=held), at(0.05, 2.2, None, 6.4, None, 6.4))
    assert (alarm.kind, alarm.step) == ("kl-above-bound", first)
    assert f"{6.4 if held else 2.2} nats a dimension, over its bound 0.1" in alarm.text
    assert advice in alarm.text


def test_a_stage_that_begins_with_a_far_higher_number_loss_is_reported() -> None:
    def stages(*after: float) -> list[dict[str, Any]]:
        losses = [1.9] * 30 + list(after)
        return [record(n, "heads" if n <= 30 else "lora", reg_loss_effective=x) for n, x in enumerate(losses, 1)]

    (alarm,) = run(Alarms(V), stages(2.0, 12.0, 11.0, 9.0, *[2.0] * 20))
    assert (alarm.kind, alarm.step) == ("number-loss-jump", 34)
    assert "begins with a number loss of 9, while the stage before ended with 1.9: give it warmup_steps" in alarm.text
    assert run(Alarms(V), stages(2.0, 12.0, *[2.5] * 30)) == [], "a single step is no beginning"
    assert run(Alarms(V), stages(*[2.0] * 25, *[9.0] * 9)) == [], "later steps are a spike's matter"
    assert run(Alarms(V), [record(n, reg_loss_effective=9.0) for n in range(1, 30)]) == [], (
        "the first stage has no before"
    )


class Told:
    """A loader of 90 samples on two ranks, and a log."""

    def __init__(self) -> None:
        self.alarms: list[Alarm] = []

    def handed_out(self, ranks: list[int] | None = None) -> list[int]:
        return list(range(90)) if ranks is None else [7 + rank for rank in ranks]

    def alarm(self, alarm: Alarm) -> None:
        self.alarms.append(alarm)


def test_refused_steps_are_skipped_up_to_the_limit() -> None:
    refusals, told = Refusals(), Told()
    suspected, error = NonFiniteStep("nan", [0, 2]), NonFiniteStep("nan")
    assert refusals.refuse(suspected, 5, 100, "lora", told, told.alarm) == {"train/refused": 1.0}
    (alarm,) = told.alarms
    assert alarm.text == "step 5, stage lora: nan; samples of the ranks whose features are not finite: 7, 9"
    assert alarm.samples == list(range(64))
    refusals.refuse(error, 6, 100, "lora", told, told.alarm)
    refusals.taken()
    refusals.refuse(error, 8, 100, "lora", told, told.alarm)
    refusals.refuse(error, 9, 100, "lora", told, told.alarm)
    with pytest.raises(NonFiniteStep, match=r"step 10, stage lora: nan; samples of the step: 0, 1, .*3 in a row"):
        refusals.refuse(error, 10, 100, "lora", told, told.alarm)
    with pytest.raises(NonFiniteStep, match="the run's last"):
        Refusals().refuse(error, 100, 100, "lora", told, told.alarm)
