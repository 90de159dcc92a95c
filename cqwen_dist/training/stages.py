"""A stage is data: which groups train, for how many steps, at what learning rates and what lambda.

The schedule gives the stage of any step, each group's learning rate, and lambda. It ends a stage with `until` when
evaluation stops improving. Its decisions are saved in checkpoints, so a resumed run decides the same. It does not know
the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cqwen_dist.config import JUDGED, Ramp, Stage, UserError

# {b_scale, b_noise, C} have a rate of their own: training moves b_scale by 10 units, which is 1e5 Adam steps at 1e-4
# and a thousand at 1e-2.
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

        is_scale: one of {b_scale, b_noise, C}, whose rate is `scales` times the parameter's own unit, unless its
        group is named itself (noise, thresholds).
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


def refuse_unknown_metric(key: str, metric: str, metrics: Mapping[str, Any]) -> None:
    """Raises `UserError` for a key that names a metric which is not among an evaluation's."""
    if metric not in metrics:
        known = ", ".join(sorted(name for name in metrics if name.startswith(JUDGED)))
        raise UserError(key, metric, f"a metric of an evaluation: {known}")


def _asked(stage: Stage) -> list[Any]:
    """A stage's length as the config gives it."""
    return [stage.steps, stage.epochs, None if stage.until is None else stage.until.model_dump(mode="json")]


class Schedule:
    """All stages of a run, one after the other. A stage with `until` covers its max_steps until it is ended."""

    def __init__(self, stages: list[Stage], steps_per_epoch: int | Sequence[int]) -> None:
        """steps_per_epoch: of all stages, or of each (it depends on batch size and sequence length)."""
        self.plans: list[StagePlan] = []
        self._best: float | None = None  # metric of the current stage
        self._waited = 0  # evaluations since the best
        start = 0
        for index, stage in enumerate(stages):
            an_epoch = steps_per_epoch if isinstance(steps_per_epoch, int) else steps_per_epoch[index]
            steps = stage.steps or max(1, round((stage.epochs or 0.0) * an_epoch))
            if stage.until is not None:
                steps = stage.until.max_steps
            self.plans.append(StagePlan(stage, index, start, start + steps))
            start += steps

    @property
    def total_steps(self) -> int:
        """Of the whole run; decreases when a stage with `until` ends early."""
        return self.plans[-1].stop

    def check_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Raises `UserError` by key where a stage's `until` names no metric of evaluation."""
        for plan in self.plans:
            if plan.stage.until is not None:
                refuse_unknown_metric(f"stages.{plan.index}.until.metric", plan.stage.until.metric, metrics)

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
        self._end(plan.index, step)
        return True

    def _end(self, index: int, step: int) -> None:
        """End the stage at this step; later stages move forward."""
        early = self.plans[index].stop - step
        self.plans[index] = replace(self.plans[index], stop=step)
        for later in range(index + 1, len(self.plans)):
            plan = self.plans[later]
            self.plans[later] = replace(plan, start=plan.start - early, stop=plan.stop - early)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: each stage's end and its length in the config, the best metric, evaluations since."""
        stops, asked = [plan.stop for plan in self.plans], [_asked(plan.stage) for plan in self.plans]
        return {"stops": stops, "asked": asked, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any], step: int = 0) -> None:
        """Restore what `state_dict` returned at a step. A stage that is over stays so, whatever an epoch's length now.

        A stage whose length in the config has changed is not over (`run.folder` allows that for the current one only).
        """
        asked = state.get("asked", [])
        for index, stop in enumerate(state["stops"][: len(self.plans)]):
            plan = self.plans[index]
            same = index >= len(asked) or asked[index] == _asked(plan.stage)
            if same and (plan.stage.until is not None or stop <= step):
                self._end(index, stop)
            elif plan.start <= step and plan.stop < step:  # shorter now than the steps taken
                self._end(index, step)
        self._best, self._waited = state["best"], state["waited"]

    def at(self, step: int) -> StagePlan:
        """The stage that a step belongs to; the last one for a finished run."""
        return next((plan for plan in self.plans if step < plan.stop), self.plans[-1])

    def features_trained_by(self, plan: StagePlan) -> bool:
        """Whether embedding or lora trains in this stage or has in an earlier one."""
        return any(p.stage.groups & {"embedding", "lora"} for p in self.plans[: plan.index + 1])

    def newly_trained(self, plan: StagePlan) -> frozenset[str]:
        """Groups that train in this stage and not in the one before: their moments begin at zero."""
        before = self.plans[plan.index - 1].stage.groups if plan.index else frozenset()
        return plan.stage.groups - before
