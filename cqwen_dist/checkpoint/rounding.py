"""A model in another dtype, and what that changes: its outputs on sixteen tokens, before and after."""

from __future__ import annotations

import torch
from torch import Tensor

from cqwen_dist.model import CausalQwenForCausalLM


@torch.no_grad()
def cast(model: CausalQwenForCausalLM, dtype: torch.dtype) -> None:
    """Backbone, adapters and token table; parameters only, since a rounded rotary frequency is a wrong one."""
    kept = {id(model.model.features.embedding.w_num), id(model.model.features.embedding.num_row)}
    for parameter in model.model.features.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def sixteen_tokens(model: CausalQwenForCausalLM) -> tuple[Tensor, Tensor]:
    """Ids and values [1,16], a number among them whose value is 99.9."""
    ids = torch.arange(16).remainder(model.config.vocab_size).unsqueeze(0)
    values = torch.zeros(ids.shape, dtype=torch.float64)
    ids[0, 8], values[0, 8] = model.config.num_token_id, 99.9
    return ids, values


@torch.no_grad()
def probe(model: CausalQwenForCausalLM) -> dict[str, Tensor]:
    """What the model makes of sixteen tokens, on the CPU: U, Y, and loc_S of the last four."""
    out = model(*sixteen_tokens(model), logits_to_keep=4)
    return {name: out[name] for name in ("loc_U", "scale_U", "loc_Y", "scale_Y", "logits")}


def change(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-30))
