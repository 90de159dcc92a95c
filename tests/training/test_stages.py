"""The schedule: which stage a step belongs to, who wakes, and every learning rate."""

import json
import math
import statistics

import pytest

from cqwen_dist.config import Config, Stage, UserError
from cqwen_dist.config.training import GROUPS, HEADS
from cqwen_dist.training.stages import DEFAULT_SCALES_LR, Schedule, StagePlan
from cqwen_dist.training.start import refuse_unknown_metrics
from cqwen_dist.training.zero.engine import UsualNorm


def plan_of(steps: int = 11, start: int = 5, **options: object) -> StagePlan:
    fields = {"name": "s", "train": ["heads", "lora"], "steps": steps, "lr": 1.0, **options}
    return StagePlan(Stage.model_validate(fields), 0, start, start + steps)


@pytest.mark.parametrize(
    ("schedule", "expected"), [("constant", [1, 1, 1]), ("linear", [1, 0.55, 0.1]), ("cosine", [1, 0.55, 0.1])]
)
def test_decay_begins_at_one_and_ends_at_the_floor(schedule: str, expected: list[float]) -> None:
    plan = plan_of(schedule=schedule)
    assert [plan.factor(step) for step in (5, 10, 15)] == pytest.approx(expected)


def test_warm_up_rises_from_above_zero_and_the_decay_begins_behind_it() -> None:
    plan = plan_of(steps=7, start=0, warmup_steps=3, schedule="linear")
    assert [plan.factor(step) for step in range(7)] == pytest.approx([0.25, 0.5, 0.75, 1, 0.7, 0.4, 0.1])
    assert plan_of(steps=1, start=0).factor(0) == 1.0


def test_groups_have_the_stage_rate_unless_named_and_scales_their_own() -> None:
    plan = plan_of(start=0, schedule="constant", lr=0.3, lr_groups={"lora": 0.1})
    assert plan.lr("classifier", False, 0) == 0.3
    assert plan.lr("lora", False, 0) == 0.1
    assert plan.lr("abduction", True, 0) == DEFAULT_SCALES_LR == plan.lr("thresholds", True, 0)
    assert plan.lr("abduction", False, 0) == 0.3
    assert plan.lr("noise", True, 0, unit=2e-3) == DEFAULT_SCALES_LR * 2e-3
    assert plan.lr("embedding", False, 0) == 0.0, "frozen"


def test_a_named_scale_group_overrides_the_rate_of_scales() -> None:
    plan = plan_of(start=0, schedule="constant", lr_groups={"scales": 0.5, "thresholds": 0.7, "abduction": 0.2})
    assert plan.lr("thresholds", True, 0) == 0.7
    assert plan.lr("noise", True, 0) == 0.5
    assert plan.lr("abduction", True, 0) == 0.5, "b_scale follows `scales`; `abduction` names its matrices"
    assert plan.lr("abduction", False, 0) == 0.2


def stages(*members: list[str], **lengths: object) -> list[Stage]:
    return [
        Stage.model_validate({"name": str(i), "train": train, **(lengths or {"steps": 2})})
        for i, train in enumerate(members)
    ]


def test_heads_means_its_five_groups() -> None:
    (stage,) = stages(["heads"])
    assert stage.groups == frozenset(HEADS)
    assert set(HEADS) | {"embedding", "lora"} == set(GROUPS)


def test_newly_trained_groups_are_those_frozen_in_the_stage_before() -> None:
    schedule = Schedule(stages(["heads"], ["heads", "lora"], ["lora"], ["noise", "lora"]), 10)
    assert [schedule.newly_trained(plan) for plan in schedule.plans] == [
        frozenset(HEADS),
        frozenset({"lora"}),
        frozenset(),
        frozenset({"noise"}),
    ]


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 7), (2.0, 14), (0.5, 4), (0.01, 1)])
def test_epochs_are_converted_to_at_least_one_step(epochs: float, steps: int) -> None:
    assert Schedule(stages(["heads"], epochs=epochs), steps_per_epoch=7).total_steps == steps


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [0.7, 0.7, 0.7, 0.7]),
        (0.25, [0.25, 0.25, 0.25, 0.25]),
        ({"start": 0.0, "end": 1.0}, [0.0, 0.25, 0.5, 1.0]),
        ({"start": 1.0, "end": 3.0, "steps": 3}, [1.0, 3.0, 3.0, 3.0]),
    ],
)
def test_lambda_is_a_number_or_a_ramp_over_the_stage(given: object, expected: list[float]) -> None:
    plan = plan_of(steps=9, start=10, reg_weight=given)
    assert [plan.reg_weight(step, 0.7) for step in (10, 12, 14, 18)] == pytest.approx(expected, rel=1e-4)


def until(**options: object) -> Schedule:
    """A stage of 3 steps, one that is watched (100 at most), one of 5."""
    middle = {"name": "m", "train": ["lora"], "until": {"max_steps": 100, "patience": 2, **options}}
    return Schedule([*stages(["heads"], steps=3), Stage.model_validate(middle), *stages(["noise"], steps=5)], 10)


def test_a_stage_ends_after_patience_evaluations_and_the_rest_moves_up() -> None:
    schedule = until()
    assert schedule.total_steps == 108
    assert not schedule.observe(2, {"eval/cls_loss_mean": 0.0}), "not this stage's"
    seen = [3.0, 2.0, 2.1, 1.9, 1.9, 2.5]
    ended = [schedule.observe(10 * (i + 1), {"eval/cls_loss_mean": value}) for i, value in enumerate(seen)]
    assert ended == [False, False, False, False, False, True]
    assert [(plan.start, plan.stop) for plan in schedule.plans] == [(0, 3), (3, 60), (60, 65)]
    assert schedule.at(60).index == 2
    assert schedule.total_steps == 65


def test_improvement_depends_on_the_metrics_direction() -> None:
    rising = until(metric="eval/accuracy")
    found = [rising.observe(10 * i + 10, {"eval/accuracy": value}) for i, value in enumerate([0.5, 0.52, 0.52, 0.51])]
    assert found == [False, False, False, True]
    never = until()
    assert [never.observe(10 * i + 10, {"eval/cls_loss_mean": float("nan")}) for i in range(2)] == [False, True]


def test_early_stopping_state_is_resumed() -> None:
    first, second = until(), until()
    for step, value in ((10, 3.0), (20, 2.0), (30, 2.1)):
        first.observe(step, {"eval/cls_loss_mean": value})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.observe(40, {"eval/cls_loss_mean": 2.2}) is True
    third = until()
    third.load_state_dict(json.loads(json.dumps(second.state_dict())))
    assert [(plan.start, plan.stop) for plan in third.plans] == [(0, 3), (3, 40), (40, 45)]
    assert third.state_dict()["waited"] == 0


def test_a_new_metric_ignores_the_old_best() -> None:
    first, second = until(), until(metric="eval/accuracy")
    for step, value in ((10, 6.0), (20, 6.1)):
        first.observe(step, {"eval/cls_loss_mean": value})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())), step=20)
    assert [second.observe(step, {"eval/accuracy": step / 100}) for step in (30, 40)] == [False, False]
    longer = until(max_steps=200)
    longer.load_state_dict(json.loads(json.dumps(first.state_dict())), step=20)
    assert longer.observe(30, {"eval/cls_loss_mean": 6.2}), "the metric is the same: this is the second in a row"


def test_an_unknown_metric_is_refused_by_key() -> None:
    heads, watched = ({"name": name, "train": ["heads"]} for name in "hw")
    chosen = [{**heads, "steps": 3}, {**watched, "until": {"max_steps": 100, "metric": "eval/recal"}}]
    data = {"train": "unused", "eval_fraction": 0.1}
    config = Config.model_validate({"model": {"name_or_path": "unused"}, "data": data, "stages": chosen})
    with pytest.raises(UserError, match=r"stages\.1\.until\.metric: found 'eval/recal'.*eval/recall"):
        refuse_unknown_metrics(config, {"eval/recall": 1.0, "dist/x": 0.0})


@pytest.mark.parametrize(
    ("now", "lr", "says"),
    [
        (32, 1e-3, "lr goes from 0.0001 to 0.000574. With stages.1.lr=0.000161 it would go on from 0.0001"),
        (32, 1.61e-4, None),  # as the note says
        (20, 1e-3, None),  # shorter than the steps taken: nothing is left
        (16, 1e-3, None),
    ],
)
def test_a_longer_stage_says_that_the_rate_jumps_and_what_goes_on(now: int, lr: float, says: str | None) -> None:
    """A finished run of 6 + 16 steps goes on with its cosine stretched."""
    heads = Stage(name="heads", train=["heads"], steps=6)

    def schedule(steps: int, lr: float) -> Schedule:
        again = Stage(name="lora", train=["lora"], steps=steps, lr=lr, schedule="cosine", warmup_steps=2)
        return Schedule([heads, again], 8)

    state = json.loads(json.dumps(schedule(16 if now != 20 else 40, 1e-3).state_dict()))
    step = 22 if now != 20 else 30
    later = schedule(now, lr)
    later.load_state_dict(state, step)
    note = later.jump(state, step)
    assert note is None if says is None else note is not None and says in note, note


def test_a_shorter_stage_says_that_the_rate_falls() -> None:
    long, short = (
        Schedule([Stage(name="s", train=["heads"], steps=n, lr=1e-3, schedule="linear")], 8) for n in (40, 20)
    )
    short.load_state_dict(long.state_dict(), 10)
    assert "20 steps instead of 40: lr goes from 0.000792 to" in str(short.jump(long.state_dict(), 10))
    constant = Schedule([Stage(name="s", train=["heads"], steps=40, lr=1e-3, schedule="constant")], 8)
    assert constant.jump({**constant.state_dict(), "stops": [20]}, 10) is None


def test_the_usual_limit_is_three_times_the_median_of_64_norms() -> None:
    usual, norms = UsualNorm(None), [float(1 + (37 * k) % 101) for k in range(200)]
    for k, norm in enumerate(norms):
        expected = 3 * statistics.median(norms[max(0, k - 64) : k]) if k >= 5 else math.inf
        assert usual.limit() == expected
        usual.add(norm)
    assert usual.seen == norms[-64:]
    again = UsualNorm(None)
    again.seen = list(json.loads(json.dumps(usual.seen)))
    assert again.limit() == usual.limit()
    fixed, zero = UsualNorm(1.5), UsualNorm(None)
    for _ in range(10):
        fixed.add(1e6)
        zero.add(0.0)  # w_num alone on texts without numbers: 0/0 would be in every weight
    assert (fixed.limit(), zero.limit()) == (1.5, math.inf)
