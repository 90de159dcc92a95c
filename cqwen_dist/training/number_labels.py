"""What the numbers of a batch are to be: one value each, several values, or one value of a type (seed S4 4.7)."""

from __future__ import annotations

import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.model import CausalQwenModel
from cqwen_dist.model.configuration import CausalQwenConfig
from cqwen_dist.ops.cauchy import Cauchy


def number_labels(
    batch: Batch, keep: Tensor, shape: CausalQwenConfig, value_weights: list[float] | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(values [N], or [N,R] with further values; their weights [N,R] or None; types [N] or None) at positions `keep`.

    Raw unit, float64. A value that a position does not have weighs 0; what is no number has type -1.
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


def count_further(
    model: CausalQwenModel,
    u_prime: Cauchy,
    batch: Batch,
    keep: Tensor,
    sums: dict[str, Tensor],
    lists: dict[str, list[Tensor]],
) -> None:
    """Add to an evaluation's sums a batch's types of numbers, to its lists how far off further values are (raw unit).

    u_prime: of the positions `keep` [N]. Nothing is added where the model has neither.
    """
    values, weights, types = number_labels(batch, keep, model.config)
    if types is not None:
        sums["types"] += (types >= 0).sum()
        sums["types_right"] += ((model.action.number_type(u_prime) == types) & (types >= 0)).sum()
    if weights is not None:
        error = (model.target.inverse(model.action.values(u_prime).loc.double()) - values).abs()
        for i, name in enumerate(model.config.more_values or (), 1):
            lists[f"error {name}"].append(error[weights[:, i] > 0, i])
