"""Alarms go off where they should, once, and not on runs that are well."""

import math
import random
from typing import Any

import pytest

from cqwen_dist.training.telemetry.alarms import Alarm, Alarms, Refusals
from cqwen_dist.training.zero.engine import NonFiniteStep

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
