"""Stages as data: the trained groups, number of steps, learning rates and lambda of each stage.

The schedule gives the stage of each step. It ends a stage with `until` once evaluation stops improving. Checkpoints
save its decisions, so a resumed run takes the same ones. The schedule does not know the optimizer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from cqwen_dist.config.training import Ramp, Stage, rises

# Learning rate of b_scale, b_noise and C. Training moves b_scale by about 10 units: 1e5 Adam steps at 1e-4, but only a
# thousand at 1e-2.
DEFAULT_SCALES_LR = 1e-2
FINAL = 0.1  # the last learning rate of a stage that decays, as a share of its peak


@dataclass(frozen=True)
class StagePlan:
    """One stage with a resolved step range: [start, stop) of the run's optimizer steps."""

    stage: Stage
    index: int
    start: int
    stop: int

    @property
    def steps(self) -> int:
        return self.stop - self.start

    def factor(self, step: int) -> float:
        """Learning rate factor at a step of the run: warm-up, then decay to `FINAL` at the stage's last step."""
        stage, done = self.stage, step - self.start
        if done < stage.warmup_steps:
            return (done + 1) / (stage.warmup_steps + 1)
        if stage.schedule == "constant":
            return 1.0
        span = max(self.steps - stage.warmup_steps - 1, 1)
        progress = min((done - stage.warmup_steps) / span, 1.0)
        decay = 1.0 - progress if stage.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return FINAL + (1.0 - FINAL) * decay

    def lr(self, group: str, is_scale: bool, step: int, unit: float = 1.0) -> float:
        """Learning rate of a group at a step; 0 if the group is frozen.

        is_scale: the parameter is b_scale, b_noise or C. Its rate is `scales` times `unit`, unless `lr_groups` names
        its group (noise, thresholds).
        """
        if group not in self.stage.groups:
            return 0.0
        named = self.stage.lr_groups
        if is_scale and (group == "abduction" or group not in named):
            peak = named.get("scales", DEFAULT_SCALES_LR) * unit
        else:
            peak = named.get(group, self.stage.lr)
        return peak * self.factor(step)

    def reg_weight(self, step: int, default: float) -> float:
        """lambda at a step (S4 4.5.3): the number or ramp of the stage, or the default if the stage has none."""
        weight = self.stage.reg_weight
        if not isinstance(weight, Ramp):
            return default if weight is None else weight
        span = max((weight.steps or self.steps) - 1, 1)
        return weight.start + (weight.end - weight.start) * min((step - self.start) / span, 1.0)


def _asked(stage: Stage) -> list[Any]:
    return [stage.steps, stage.epochs, stage.until and stage.until.model_dump(mode="json")]


class Schedule:
    """All stages of a run, in order. A stage with `until` counts with max_steps until it ends."""

    def __init__(self, stages: list[Stage], steps_per_epoch: int | Sequence[int]) -> None:
        """steps_per_epoch: one number for all stages, or one per stage (batch size and length may differ)."""
        per_epoch = [steps_per_epoch] * len(stages) if isinstance(steps_per_epoch, int) else steps_per_epoch
        self._stages = stages
        self._steps = [
            stage.until.max_steps if stage.until else stage.steps or max(1, round((stage.epochs or 0.0) * an_epoch))
            for stage, an_epoch in zip(stages, per_epoch, strict=True)
        ]
        self._best: float | None = None  # best metric of the current stage
        self._waited = 0  # evaluations since then

    @property
    def plans(self) -> list[StagePlan]:
        """The current plan of all stages."""
        stages = zip(self._stages, self._steps, accumulate(self._steps), strict=True)
        return [StagePlan(stage, i, stop - steps, stop) for i, (stage, steps, stop) in enumerate(stages)]

    @property
    def total_steps(self) -> int:
        """Number of steps of the run. Decreases when a stage with `until` ends early."""
        return sum(self._steps)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Record an evaluation after `step` steps. Returns whether it ends the stage of the last step.

        Metrics are equal on all ranks, and so is the result. NaN is not an improvement.
        """
        plan = self.at(step - 1)
        until = plan.stage.until
        if until is None:
            return False
        value = float(metrics[until.metric])
        gain = math.inf if self._best is None else (value - self._best) * (1 if rises(until.metric) else -1)
        if not math.isnan(value) and gain > 0:
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        if self._waited < until.patience and step < plan.stop:
            return False
        self._best, self._waited = None, 0
        self._steps[plan.index] = step - plan.start  # later stages move forward
        return True

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: end and configured length of each stage, best metric, evaluations since then."""
        asked = [_asked(stage) for stage in self._stages]
        lengths = {"stops": [*accumulate(self._steps)], "asked": asked, "peaks": [stage.lr for stage in self._stages]}
        return {**lengths, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any], step: int = 0) -> None:
        """Restore a `state_dict` at a step. An ended stage stays ended if the length of an epoch has changed.

        A stage with a changed length in the config has not ended (`run.folder` only allows this for the current stage).
        The best metric is kept if the stage still uses the same metric.
        """
        asked = state["asked"]
        for index, stop in enumerate(state["stops"][: len(self._stages)]):
            plan = self.plans[index]  # earlier stages keep their ends
            same = index >= len(asked) or asked[index] == _asked(plan.stage)
            if same and (plan.stage.until is not None or stop <= step):
                self._steps[index] = stop - plan.start
            elif plan.start <= step and plan.stop < step:  # now shorter than the steps taken
                self._steps[index] = step - plan.start
        plan = self.at(step)
        judged = [each[2] and each[2]["metric"] for each in (*asked[plan.index : plan.index + 1], _asked(plan.stage))]
        self._best, self._waited = (state["best"], state["waited"]) if judged[0] == judged[-1] else (None, 0)

    def jump(self, state: Mapping[str, Any], step: int) -> str | None:
        """A note if the stage at a step has another length than in a `state_dict`, and so another learning rate."""
        plan = self.at(max(step - 1, 0))
        stop = (state["stops"][plan.index :] or [plan.stop])[0]
        if not step or stop == plan.stop or step >= plan.stop:
            return None
        peak = state.get("peaks", [plan.stage.lr] * (plan.index + 1))[plan.index]
        before = peak * replace(plan, stop=stop).factor(step - 1)
        same, now = plan.stage.lr * plan.factor(step - 1), plan.stage.lr * plan.factor(step)
        if math.isclose(before, same, rel_tol=0.01):
            return None
        goes_on = f"stages.{plan.index}.lr={plan.stage.lr * before / same:.3g}"
        groups = f" (and lr_groups times {before / same:.3g})" if plan.stage.lr_groups else ""
        return (
            f"note: stage {plan.stage.name} has {plan.steps} steps instead of {stop - plan.start}: lr goes from "
            f"{before:.3g} to {now:.3g}. With {goes_on}{groups} it would go on from {before:.3g}"
        )

    def at(self, step: int) -> StagePlan:
        """The stage of a step; the last stage for a finished run."""
        plans = self.plans
        return next((plan for plan in plans if step < plan.stop), plans[-1])

    def newly_trained(self, plan: StagePlan) -> frozenset[str]:
        """Groups that train in this stage but not in the previous one; their moments start at zero."""
        before = self.plans[plan.index - 1].stage.groups if plan.index else frozenset()
        return plan.stage.groups - before
