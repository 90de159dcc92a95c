"""A stage is data: which groups are awake, for how many steps, at what learning rates.

The schedule answers two questions about any step: which stage it belongs to, and what learning rate each group has.
Nothing here knows of an optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cqwen_dist.config import Stage

# {b_scale, b_noise, C} have a rate of their own: from b_scale = 1 to where training ends are 10 units, 1e5 Adam
# steps at 1e-4 and a thousand at 1e-2.
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
        """Learning rate of a group at a step; 0 while it sleeps.

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


class Schedule:
    """All stages of a run, one after the other."""

    def __init__(self, stages: list[Stage], steps_per_epoch: int) -> None:
        self.plans: list[StagePlan] = []
        start = 0
        for index, stage in enumerate(stages):
            steps = stage.steps or max(1, round((stage.epochs or 0.0) * steps_per_epoch))
            self.plans.append(StagePlan(stage, index, start, start + steps))
            start += steps

    @property
    def total_steps(self) -> int:
        return self.plans[-1].stop

    def at(self, step: int) -> StagePlan:
        """The stage that a step belongs to; the last one for a finished run."""
        return next((plan for plan in self.plans if step < plan.stop), self.plans[-1])

    def woken(self, plan: StagePlan) -> frozenset[str]:
        """Groups that are awake in this stage and were not in the one before: their moments begin at zero."""
        before = self.plans[plan.index - 1].stage.groups if plan.index else frozenset()
        return plan.stage.groups - before
