"""The tensors of one generation.

Shape letters: B rows, T prompt positions, T' positions of prompt and continuation, C causal dimensions, K numbers in
memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.batch import positions_in
from cqwen_dist.generate.numbers import POWERS, GeneratedNumbers, empty_numbers
from cqwen_dist.heads.intervals import Intervals


@dataclass(frozen=True)
class Buffers:
    """The tensors of a step. The write position `at` is on their device, so writing does not wait for it."""

    ids: Tensor  # [B,T'] int64; padding at unwritten positions
    numbers: GeneratedNumbers  # [B,T'] each
    mask: Tensor  # [B,T'] bool: False at the prompt's padding; causality hides later positions
    positions: Tensor  # [B,T'] int64
    memory: Tensor  # [B,K] float64: memory of the number head for the numbers so far
    done: Tensor  # [B] bool: rows that have ended
    lengths: Tensor  # [B] int64: number of written tokens, including an end token
    at: Tensor  # [1] int64: the next position to write
    powers: Tensor  # `POWERS`
    cache: Any = None  # key-value cache of the transformer

    @classmethod
    def of(cls, model: Any, ids: Tensor, values: Tensor | None, mask: Tensor | None, room: int, pad: int) -> Buffers:
        """Buffers for a prompt [B,T] with T' = room positions, without a cache. Arguments as in `generate`."""
        config, device, (b, prompt) = model.config, ids.device, ids.shape
        all_ids = torch.full((b, room), pad, dtype=torch.int64, device=device)
        all_ids[:, :prompt] = ids
        all_values = torch.zeros((b, room), dtype=torch.float64, device=device)
        if values is not None:
            all_values[:, :prompt] = values.to(all_values)
        real = torch.ones((b, room), dtype=torch.bool, device=device)
        if mask is not None:
            real[:, :prompt] = mask.bool()
        positions = positions_in(real)
        is_number = (all_ids == config.num_token_id) & real
        head = model.action.number_head
        memory = head.memory(is_number, all_values, positions)[:, prompt - 1]
        numbers = empty_numbers(all_values, head, Intervals.from_dict(config.calibration))
        none, zero = torch.zeros(b, dtype=torch.bool, device=device), torch.zeros_like(ids[:, 0])
        at = torch.tensor([prompt], device=device)
        return cls(all_ids, numbers, real, positions, memory, none, zero, at, POWERS.to(device))
