"""A stage is data: which groups train, for how many steps, at what learning rates and what lambda.

The schedule gives the stage of any step. It ends a stage with `until` when evaluation stops improving. Its decisions
are saved in checkpoints, so a resumed run decides the same. It does not know the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from cqwen_dist.config import JUDGED, Config, Ramp, Stage, UserError

# The rate of {b_scale, b_noise, C}: training moves b_scale by 10 units, which takes 1e5 Adam steps at 1e-4 and a
# thousand at 1e-2.
DEFAULT_SCALES_LR = 1e-2


@dataclass(frozen=True)
class StagePlan:
    """One stage with its steps resolved: it covers [start, stop) of the run's optimizer steps."""

    stage: Stage
    index: int
    start: int
    stop: int

    @property
    def steps(self) -> int:
        return self.stop - self.start

    def factor(self, step: int) -> float:
        """The schedule at a step of the run: warm-up, then decay to min_lr_ratio on the stage's last step."""
        stage, done = self.stage, step - self.start
        if done < stage.warmup_steps:
            return (done + 1) / (stage.warmup_steps + 1)
        if stage.schedule == "constant":
            return 1.0
        span = max(self.steps - stage.warmup_steps - 1, 1)
        progress = min((done - stage.warmup_steps) / span, 1.0)
        decay = 1.0 - progress if stage.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return stage.min_lr_ratio + (1.0 - stage.min_lr_ratio) * decay

    def lr(self, group: str, is_scale: bool, step: int, unit: float = 1.0) -> float:
        """Learning rate of a group at a step; 0 while it is frozen.

        is_scale: one of {b_scale, b_noise, C}. Its rate is `scales` times the parameter's own unit, unless `lr_groups`
        names its group (noise, thresholds).
        """
        if group not in self.stage.groups:
            return 0.0
        named: Mapping[str, float] = {str(name): rate for name, rate in self.stage.lr_groups.items()}
        if is_scale and (group == "abduction" or group not in named):
            peak = named.get("scales", DEFAULT_SCALES_LR) * unit
        else:
            peak = named.get(group, self.stage.lr)
        return peak * self.factor(step)

    def reg_weight(self, step: int, default: float) -> float:
        """lambda at a step (S4 4.5.3): the stage's number or ramp, or the default where the stage names none."""
        weight = self.stage.reg_weight
        if not isinstance(weight, Ramp):
            return default if weight is None else weight
        span = max((weight.steps or self.steps) - 1, 1)
        way = min((step - self.start) / span, 1.0)
        if weight.shape == "cosine":
            way = 0.5 * (1.0 - math.cos(math.pi * way))
        return weight.start + (weight.end - weight.start) * way


def refuse_unknown_metrics(config: Config, metrics: Mapping[str, Any]) -> None:
    """Raises `UserError` by key where the config names a metric that is not among an evaluation's."""
    named = {f"stages.{i}.until.metric": s.until.metric for i, s in enumerate(config.stages) if s.until is not None}
    if config.train.keep_best and metrics:
        named["train.best_metric"] = config.train.best_metric
    for key, metric in named.items():
        if metric not in metrics:
            known = ", ".join(sorted(name for name in metrics if name.startswith(JUDGED)))
            raise UserError(key, metric, f"a metric of an evaluation: {known}")


def _asked(stage: Stage) -> list[Any]:
    """A stage's length as the config gives it."""
    return [stage.steps, stage.epochs, stage.until and stage.until.model_dump(mode="json")]


def _judged(asked: list[Any]) -> tuple[Any, ...]:
    """By what a stage of that length ends: a metric and which way is better; empty where by its steps."""
    until = asked[2]
    return () if until is None else (until["metric"], until["better"])


class Schedule:
    """All stages of a run, in order. A stage with `until` is planned with its max_steps until it ends."""

    def __init__(self, stages: list[Stage], steps_per_epoch: int | Sequence[int]) -> None:
        """steps_per_epoch: of all stages, or of each (it depends on batch size and sequence length)."""
        per_epoch = [steps_per_epoch] * len(stages) if isinstance(steps_per_epoch, int) else steps_per_epoch
        self._stages = stages
        self._steps = [
            stage.until.max_steps if stage.until else stage.steps or max(1, round((stage.epochs or 0.0) * an_epoch))
            for stage, an_epoch in zip(stages, per_epoch, strict=True)
        ]
        self._best: float | None = None  # metric of the current stage
        self._waited = 0  # evaluations since the best

    @property
    def plans(self) -> list[StagePlan]:
        """The stages as they are planned now."""
        stages = zip(self._stages, self._steps, accumulate(self._steps), strict=True)
        return [StagePlan(stage, i, stop - steps, stop) for i, (stage, steps, stop) in enumerate(stages)]

    @property
    def total_steps(self) -> int:
        """Of the whole run; decreases when a stage with `until` ends early."""
        return sum(self._steps)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Note an evaluation after `step` steps; True if it ends the stage of the last step.

        Metrics are equal on every rank, so the answer is too. NaN is no improvement.
        """
        plan = self.at(step - 1)
        until = plan.stage.until
        if until is None:
            return False
        value = float(metrics[until.metric])
        gain = math.inf if self._best is None else (value - self._best) * (1 if until.higher_is_better else -1)
        if not math.isnan(value) and gain > until.min_delta:
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        if self._waited < until.patience and step < plan.stop:
            return False
        self._best, self._waited = None, 0
        self._steps[plan.index] = step - plan.start  # later stages move forward
        return True

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: each stage's end and its length in the config, the best metric, evaluations since."""
        asked = [_asked(stage) for stage in self._stages]
        return {"stops": [*accumulate(self._steps)], "asked": asked, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any], step: int = 0) -> None:
        """Restore what `state_dict` returned at a step. A stage that has ended stays so if an epoch's length changes.

        A stage whose length in the config has changed has not ended (`run.folder` allows it for the current one only).
        The best metric counts for a stage that goes on with the same one.
        """
        asked = state.get("asked", [])
        for index, stop in enumerate(state["stops"][: len(self._stages)]):
            plan = self.plans[index]  # those before it have ended where they did
            same = index >= len(asked) or asked[index] == _asked(plan.stage)
            if same and (plan.stage.until is not None or stop <= step):
                self._steps[index] = stop - plan.start
            elif plan.start <= step and plan.stop < step:  # shorter now than the steps taken
                self._steps[index] = step - plan.start
        plan = self.at(step)
        same = plan.index >= len(asked) or _judged(asked[plan.index]) == _judged(_asked(plan.stage))
        self._best, self._waited = (state["best"], state["waited"]) if same else (None, 0)

    def at(self, step: int) -> StagePlan:
        """The stage that a step belongs to; the last one for a finished run."""
        plans = self.plans
        return next((plan for plan in plans if step < plan.stop), plans[-1])

    def features_trained_by(self, plan: StagePlan) -> bool:
        """Whether embedding or lora trains in this stage or has in an earlier one."""
        return any(p.stage.groups & {"embedding", "lora"} for p in self.plans[: plan.index + 1])

    def newly_trained(self, plan: StagePlan) -> frozenset[str]:
        """Groups that train in this stage and not in the one before: their moments begin at zero."""
        before = self.plans[plan.index - 1].stage.groups if plan.index else frozenset()
        return plan.stage.groups - before
