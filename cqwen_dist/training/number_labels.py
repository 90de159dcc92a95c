"""The labels of a batch's numbers: each has one value, several values, or one value of a type (seed S4 4.7)."""

from __future__ import annotations

import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.model.configuration import CausalQwenConfig


def number_labels(
    batch: Batch, keep: Tensor, shape: CausalQwenConfig, value_weights: list[float] | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(values [N], or [N,R] with further values; their weights [N,R] or None; types [N] or None) at positions `keep`.

    Raw unit, float64. A value that a position does not have has weight 0; a position without a number has type -1.
    """
    values = batch.numeric_labels.flatten()[keep]
    if shape.number_types:
        types = batch.numeric_mask.flatten()[keep].long() - 1
        places, kind = batch.typed.unbind(1)
        types[torch.searchsorted(keep, places.contiguous())] = kind
        return values, None, types
    if not shape.more_values:
        return values, None, None
    columns = 1 + len(shape.more_values)
    every = torch.zeros(len(keep), columns, dtype=torch.float64, device=keep.device)
    weights = torch.zeros(len(keep), columns, device=keep.device)
    factor = torch.tensor(value_weights or [1.0] * columns, device=keep.device)
    every[:, 0], weights[:, 0] = values, factor[0]
    places, which = torch.searchsorted(keep, batch.more[:, 0].long()), batch.more[:, 1].long()
    every[places, which], weights[places, which] = batch.more[:, 2], factor[which]
    return every, weights, None
