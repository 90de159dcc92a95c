"""z of a data set's evaluations, in memory: computed again only where something before it has changed.

A stage that trains the heads alone evaluates the same z every time. An evaluation from kept z equals one without, to
the bit: it is what the same batches gave.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.training.zero.engine import Engine

ROOM = 2**30  # bytes of a rank


class KeptFeatures:
    """Gives z of the i-th batch of an evaluation. Ranks bring equally many batches in one order."""

    def __init__(self, forward: Callable[[Batch, Tensor], Tensor], check: Callable[[], None], engine: Engine) -> None:
        """forward: z of a batch's label positions. check: called instead of it, where z is known; it may raise."""
        self.forward, self.check, self.engine = forward, check, engine
        self._z: list[Tensor] = []
        self._known = -1

    def __call__(self, i: int, batch: Batch, keep: Tensor) -> Tensor:
        """z [N,H] of the i-th batch, at its label positions `keep`, on the batch's device."""
        if (now := self.engine.feature_changes) != self._known:
            self._z, self._known = [], now
        if i < len(self._z):
            self.check()
            return self._z[i].to(keep.device)
        z = self.forward(batch, keep)
        if i == len(self._z) and not self.engine.features_train:  # the first pass since the change
            self._z.append(z.detach().cpu())
        return z
