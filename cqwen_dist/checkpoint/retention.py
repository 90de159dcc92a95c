"""Which checkpoints of a run stay (no torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """The newest few, the best few by a figure of evaluation, and every n-th for good.

    every: 0 for none. metric: a figure that was taken at that very step. The newest is always kept, whatever the
    numbers: it has just been written and read back.
    """

    newest: int = 3
    best: int = 0
    every: int = 0
    metric: str = "eval/cls_loss_mean"
    higher: bool = False  # is better

    def outdated(self, figures: Mapping[int, Mapping[str, float]], newest_step: int) -> list[int]:
        """The steps of checkpoints to delete. figures: of each checkpoint, by step, empty where it was not evaluated.

        Steps beyond the newest are of a run that resumed from an earlier one: they are ignored.
        """
        steps = sorted(step for step in figures if step <= newest_step)
        kept = {*steps[-max(self.newest, 1) :], newest_step}
        kept |= {step for step in steps if self.every and step % self.every == 0}
        kept |= set(self.best_of({step: figures[step] for step in steps}))
        return [step for step in steps if step not in kept]

    def best_of(self, figures: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The steps of the best, the best first; of equals the later."""
        known = {step: found[self.metric] for step, found in figures.items() if self.metric in found}
        sign = -1 if self.higher else 1
        order = sorted((sign * value, -step) for step, value in known.items() if not math.isnan(value))
        return [-step for _, step in order[: self.best]]
