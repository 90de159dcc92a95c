"""The tensors of one generation, in fixed shapes, and the memory that a model keeps between two generations.

Letters: B rows, T prompt positions, T' positions of prompt and continuation, C causal dimension, K numbers in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import mark_static_address  # transformers' static cache marks its own by it
from transformers.cache_utils import Cache, StaticLayer

from cqwen_dist.generate.numbers import POWERS, GeneratedNumbers, empty_numbers
from cqwen_dist.heads.intervals import Intervals

ROOM = 64  # a static cache holds a multiple of so many positions: texts of similar lengths share one, and its graphs


@dataclass(frozen=True)
class Buffers:
    """What a step reads and writes. A step of fixed shapes writes at `at`, which is on the device, and moves it on."""

    ids: Tensor  # [B,T'] int64; padding where nothing is written yet
    numbers: GeneratedNumbers  # [B,T'] each
    mask: Tensor  # [B,T'] bool: no padding of the prompt; later positions are hidden by causality
    positions: Tensor  # [B,T'] int64
    memory: Tensor  # [B,K] float64: what the number head knows of the numbers so far
    done: Tensor  # [B] bool: rows that have ended
    lengths: Tensor  # [B] int64: tokens that were written, an end among them
    at: Tensor  # [1] int64: the position to be written
    powers: Tensor  # `POWERS`
    cache: Any = None  # the transformer's

    @classmethod
    def of(cls, model: Any, ids: Tensor, values: Tensor | None, mask: Tensor | None, room: int, pad: int) -> Buffers:
        """For a prompt [B,T] each, as `generate` takes it, and T' = room; without a cache."""
        config, device, (b, prompt) = model.config, ids.device, ids.shape
        all_ids = torch.full((b, room), pad, dtype=torch.int64, device=device)
        all_ids[:, :prompt] = ids
        all_values = torch.zeros((b, room), dtype=torch.float64, device=device)
        if values is not None:
            all_values[:, :prompt] = values.to(all_values)
        real = torch.ones((b, room), dtype=torch.bool, device=device)
        if mask is not None:
            real[:, :prompt] = mask.bool()
        positions = (real.cumsum(1) - 1).clamp(min=0)
        is_number = (all_ids == config.num_token_id) & real
        head = model.action.number_head
        memory = head.memory(is_number, all_values, positions)[:, prompt - 1]
        numbers = empty_numbers(all_values, head, Intervals.from_dict(config.calibration))
        none, zero = torch.zeros(b, dtype=torch.bool, device=device), torch.zeros_like(ids[:, 0])
        at = torch.tensor([prompt], device=device)
        return cls(all_ids, numbers, real, positions, memory, none, zero, at, POWERS.to(device))

    def tensors(self) -> list[Tensor]:
        """All of them but the cache's."""
        own = [*vars(self).values(), *vars(self.numbers).values(), *(self.numbers.more or ())]
        return [each for each in own if isinstance(each, Tensor)]

    def inside(self, kept: Buffers) -> Buffers:
        """These contents in the memory of `kept`, which has the same shapes."""
        for memory, own in zip(kept.tensors(), self.tensors(), strict=True):
            memory.copy_(own)
        found: dict[str, Any] = {name: each for name, each in vars(kept.numbers).items() if isinstance(each, Tensor)}
        return replace(kept, numbers=replace(self.numbers, **found, more=kept.numbers.more))

    @property
    def shape(self) -> tuple[object, ...]:
        """Shapes, dtypes and devices of all tensors."""
        return tuple((each.shape, each.dtype, each.device) for each in self.tensors())


@dataclass
class Kept:
    """What a model keeps after a generation with a static cache, for the next one of the same shape: the buffers, whose
    addresses a CUDA graph needs again, and the compiled steps. A copy of the model begins with nothing."""

    buffers: Buffers | None = None
    dtype: torch.dtype | None = None
    ahead: dict[int, Tensor] = field(default_factory=dict)  # by width: random numbers of a step, drawn before it
    near: Tensor | None = None  # W_cls in bf16
    steps: dict[object, Callable[..., Any]] = field(default_factory=dict)  # by the settings that they are made for

    @classmethod
    def of(cls, model: Any) -> Kept:
        """That of this model."""
        if not isinstance(getattr(model, "kept_decoding", None), cls):
            model.kept_decoding = cls()
        found: Kept = model.kept_decoding
        return found

    def __deepcopy__(self, memo: Any) -> Kept:
        return Kept()

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()

    def take(self, new: Buffers, layers: int, dtype: torch.dtype) -> Buffers:
        """The contents of `new` in memory that stays, with an empty static cache for so many layers, in this dtype.

        Layers with a sliding window keep all positions too, and the mask hides those outside: transformers' own layer
        for them counts positions on the host, so every step would be compiled anew.
        """
        if self.buffers is None or (self.buffers.shape, self.dtype) != (new.shape, dtype):
            self.dtype = dtype
            self.steps.clear()
            self.ahead.clear()
            self.near = None
            room = new.ids.shape[1]
            self.buffers = replace(new, cache=Cache(layers=[StaticLayer(max_cache_len=room) for _ in range(layers)]))
            stay(*self.buffers.tensors())
            return self.buffers
        self.buffers.cache.reset()
        self.buffers.cache.wide_state = None
        return new.inside(self.buffers)

    def random(self, rows: int, width: int, device: torch.device) -> Tensor:
        """Memory [rows,width] fp32 for a step's random numbers."""
        if width not in self.ahead:
            self.ahead[width] = torch.empty(rows, width, device=device)
            stay(self.ahead[width])
        return self.ahead[width]

    def copied(self, weight: Tensor) -> Tensor:
        """weight in bf16: copied at every call, as it may have been trained since the last one."""
        if self.near is None or (self.near.shape, self.near.device) != (weight.shape, weight.device):
            self.near = torch.empty_like(weight, dtype=torch.bfloat16)
            stay(self.near)
        return self.near.copy_(weight)


def stay(*tensors: Tensor) -> None:
    """Tell torch that these tensors' addresses do not change: a CUDA graph then reads and writes them in place."""
    for tensor in tensors:
        mark_static_address(tensor)
