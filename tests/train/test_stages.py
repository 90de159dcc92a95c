"""The schedule: which stage a step belongs to, who wakes, and every learning rate."""

import pytest

from cqwen_dist.config import GROUPS, HEADS, Config, DataConfig, ModelConfig, Stage
from cqwen_dist.train.stages import DEFAULT_SCALES_LR, Schedule, StagePlan


def plan_of(steps: int = 11, start: int = 5, **options: object) -> StagePlan:
    fields = {"name": "s", "train": ["heads", "lora"], "steps": steps, "lr": 1.0, **options}
    return StagePlan(Stage.model_validate(fields), 0, start, start + steps)


@pytest.mark.parametrize(
    ("schedule", "expected"), [("constant", [1, 1, 1]), ("linear", [1, 0.6, 0.2]), ("cosine", [1, 0.6, 0.2])]
)
def test_decay_begins_at_one_and_ends_at_the_floor(schedule: str, expected: list[float]) -> None:
    plan = plan_of(schedule=schedule, min_lr_ratio=0.2)
    assert [plan.factor(step) for step in (5, 10, 15)] == pytest.approx(expected)


def test_cosine_is_slower_than_linear_at_first_and_faster_later() -> None:
    cosine, linear = plan_of(min_lr_ratio=0.0), plan_of(schedule="linear", min_lr_ratio=0.0)
    assert cosine.factor(7) > linear.factor(7)
    assert cosine.factor(13) < linear.factor(13)


def test_warm_up_rises_from_above_zero_and_the_decay_begins_behind_it() -> None:
    plan = plan_of(steps=7, start=0, warmup_steps=3, schedule="linear", min_lr_ratio=0.1)
    assert [plan.factor(step) for step in range(7)] == pytest.approx([0.25, 0.5, 0.75, 1, 0.7, 0.4, 0.1])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_stage_of_one_step_moves(schedule: str) -> None:
    assert plan_of(steps=1, start=0, schedule=schedule).factor(0) == 1.0


def test_a_stage_shorter_than_its_warm_up_stays_below_its_peak() -> None:
    plan = plan_of(steps=2, start=0, warmup_steps=5)
    assert 0 < plan.factor(0) < plan.factor(1) < 1


def test_groups_have_the_stage_rate_unless_named_and_scales_their_own() -> None:
    plan = plan_of(start=0, schedule="constant", lr=0.3, lr_groups={"lora": 0.1})
    assert plan.lr("classifier", False, 0) == 0.3
    assert plan.lr("lora", False, 0) == 0.1
    assert plan.lr("abduction", True, 0) == DEFAULT_SCALES_LR == plan.lr("thresholds", True, 0)
    assert plan.lr("abduction", False, 0) == 0.3
    assert plan.lr("noise", True, 0, unit=2e-3) == DEFAULT_SCALES_LR * 2e-3


def test_a_scale_group_that_is_named_itself_has_that_rate_and_scales_rules_the_rest() -> None:
    plan = plan_of(start=0, schedule="constant", lr_groups={"scales": 0.5, "thresholds": 0.7, "abduction": 0.2})
    assert plan.lr("thresholds", True, 0) == 0.7
    assert plan.lr("noise", True, 0) == 0.5
    assert plan.lr("abduction", True, 0) == 0.5, "b_scale follows `scales`; `abduction` names its matrices"
    assert plan.lr("abduction", False, 0) == 0.2


def test_rates_follow_the_schedule_and_a_sleeping_group_has_none() -> None:
    plan = plan_of(start=0, train=["heads"], schedule="linear", min_lr_ratio=0.0)
    assert plan.lr("classifier", False, 5) == pytest.approx(0.5)
    assert plan.lr("lora", False, 0) == 0.0
    assert plan.lr("embedding", False, 0) == 0.0


def stages(*members: list[str], **lengths: object) -> list[Stage]:
    return [
        Stage.model_validate({"name": str(i), "train": train, **(lengths or {"steps": 2})})
        for i, train in enumerate(members)
    ]


def test_heads_stands_for_the_five_and_all_groups_are_known() -> None:
    (stage,) = stages(["heads"])
    assert stage.groups == frozenset(HEADS)
    assert set(HEADS) | {"embedding", "lora"} == set(GROUPS)


def test_woken_are_those_that_slept_in_the_stage_before() -> None:
    schedule = Schedule(stages(["heads"], ["heads", "lora"], ["lora"], ["noise", "lora"]), 10)
    assert [schedule.woken(plan) for plan in schedule.plans] == [
        frozenset(HEADS),
        frozenset({"lora"}),
        frozenset(),
        frozenset({"noise"}),
    ]


def test_every_step_has_its_stage_and_a_finished_run_its_last() -> None:
    schedule = Schedule(stages(["heads"], ["lora"]), 10)
    assert [schedule.at(step).index for step in range(5)] == [0, 0, 1, 1, 1]
    assert schedule.total_steps == 4


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 7), (2.0, 14), (0.5, 4), (0.01, 1)])
def test_epochs_become_steps_and_never_none(epochs: float, steps: int) -> None:
    assert Schedule(stages(["heads"], epochs=epochs), steps_per_epoch=7).total_steps == steps


def test_who_ever_trains() -> None:
    given = stages(["heads"], ["heads", "embedding"])
    config = Config(model=ModelConfig(name_or_path="base"), data=DataConfig(train="train.jsonl"), stages=given)
    assert config.trains("embedding")
    assert not config.trains("lora")
