"""Which checkpoints of a run are kept (no torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """Keep the newest few, the best few by a metric of evaluation, and every n-th step.

    every: 0 for none. metric: as evaluated at the checkpoint's own step. The newest is always kept: it has just been
    written and read back.
    """

    newest: int = 3
    best: int = 0
    every: int = 0
    metric: str = "eval/cls_loss_mean"
    higher: bool = False  # is better

    def outdated(self, figures: Mapping[int, Mapping[str, float]], newest_step: int) -> list[int]:
        """The steps of checkpoints to delete. figures: each checkpoint's metrics, empty where it was not evaluated.

        Checkpoints newer than `newest_step` are ignored: they were written before the run was set back.
        """
        steps = sorted(step for step in figures if step <= newest_step)
        kept = {*steps[-max(self.newest, 1) :], newest_step}
        kept |= {step for step in steps if self.every and step % self.every == 0}
        kept |= set(self.best_of({step: figures[step] for step in steps}))
        return [step for step in steps if step not in kept]

    def best_of(self, figures: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The steps of the best, best first; among equals the later is better."""
        known = {step: found[self.metric] for step, found in figures.items() if self.metric in found}
        sign = -1 if self.higher else 1
        order = sorted((sign * value, -step) for step, value in known.items() if not math.isnan(value))
        return [-step for _, step in order[: self.best]]
