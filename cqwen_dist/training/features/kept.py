"""Keeps z of the evaluation data in memory, and computes it again only after the features have changed.

A stage that only trains the heads evaluates the same z each time. Kept z come from the same batches, so metrics are
equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.training.zero.engine import Engine

ROOM = 2**30  # bytes per rank


class KeptFeatures:
    """Returns z of the i-th evaluation batch. All ranks have the same number of batches, in a fixed order."""

    def __init__(self, forward: Callable[[Batch, Tensor], Tensor], check: Callable[[], None], engine: Engine) -> None:
        """forward: computes z at the label positions of a batch. check: called instead if z is kept; may raise."""
        self.forward, self.check, self.engine = forward, check, engine
        self._z: list[Tensor] = []
        self._known = -1

    def __call__(self, i: int, batch: Batch, keep: Tensor) -> Tensor:
        """z [N,H] of the i-th batch at its label positions `keep`, on the device of the batch."""
        if (now := self.engine.feature_changes) != self._known:
            self._z, self._known = [], now
        if i < len(self._z):
            self.check()
            return self._z[i].to(keep.device)
        z = self.forward(batch, keep)
        if i == len(self._z) and not self.engine.features_train:  # not while z changes in each step
            self._z.append(z.detach().cpu())
        return z
