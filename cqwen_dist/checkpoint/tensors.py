"""Checks tensors from a file before they are used."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cqwen_dist.config.errors import Said, UserError


def refuse_strange(
    found: Mapping[str, Tensor],
    wanted: Mapping[str, torch.Size],
    where: object,
    *,
    key: str = "checkpoint",
    dtype: torch.dtype | None = torch.float32,
    all_of_them: bool = True,
) -> None:
    """Check tensors before they are copied by name: a copy could silently broadcast, cast or skip one.

    wanted: shapes by name. dtype: None allows any float. all_of_them: False allows missing tensors. Raises `UserError`
    naming a tensor that is missing, unknown or not finite, or has a wrong shape or dtype.
    """
    whole = "every tensor of the model that its config describes, and no other"
    if all_of_them and (missing := sorted(wanted.keys() - found.keys())):
        raise UserError(key, Said(f"no {missing[0]}"), whole, str(where))
    if unknown := sorted(found.keys() - wanted.keys()):
        raise UserError(key, Said(f"{unknown[0]}, which is no part of the model"), whole, str(where))
    for name, value in found.items():
        if value.shape != wanted[name]:
            raise UserError(key, Said(f"{name} of shape {list(value.shape)}"), f"{list(wanted[name])}", str(where))
        if value.dtype != dtype if dtype is not None else not value.is_floating_point():
            allowed = "a float" if dtype is None else str(dtype).removeprefix("torch.")
            raise UserError(key, Said(f"{name} of {str(value.dtype).removeprefix('torch.')}"), allowed, str(where))
        if not bool(value.isfinite().all()):
            raise UserError(key, Said(f"{name} with a NaN or an infinity"), "finite numbers", str(where))
