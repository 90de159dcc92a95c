"""The tensors of one generation in fixed shapes, memory that a model keeps between generations, compiled steps, and
detection of the end without waiting for the GPU.

For one token of a small model the kernel launches take longer than the kernels. torch.compile fuses kernels, and with
mode "reduce-overhead" a CUDA graph launches a full step at once.
On an H200 a static cache decodes 13 times as fast as a dynamic one at batch 1 (docs/gpu.md).

Shape letters: B rows, T prompt positions, T' positions of prompt and continuation, C causal dimensions, K numbers in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import mark_static_address  # transformers' static cache marks its own by it
from torch._dynamo.exc import TorchDynamoException
from transformers.cache_utils import Cache, LinearAttentionLayer, StaticLayer
from transformers.utils import logging

from cqwen_dist.batch import positions_in
from cqwen_dist.generate.generation_settings import Settings
from cqwen_dist.generate.numbers import POWERS, GeneratedNumbers, empty_numbers
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.heads.numerals import ends_in_number

ROOM = 64  # size step of a static cache in positions: texts of similar lengths share a cache and its CUDA graphs
LATE = 4  # steps by which the host may be ahead of the GPU
AS_TRANSFORMERS = {"mode": "reduce-overhead"}  # default of transformers' CompileConfig
notes = logging.get_logger(__name__)


@dataclass(frozen=True)
class Buffers:
    """The tensors of a step. The write position `at` is a device tensor, so shapes stay fixed."""

    ids: Tensor  # [B,T'] int64; padding at unwritten positions
    numbers: GeneratedNumbers  # [B,T'] each
    mask: Tensor  # [B,T'] bool: False at the prompt's padding; causality hides later positions
    positions: Tensor  # [B,T'] int64
    memory: Tensor  # [B,K] float64: memory of the number head for the numbers so far
    done: Tensor  # [B] bool: rows that have ended
    lengths: Tensor  # [B] int64: number of written tokens, including an end token
    at: Tensor  # [1] int64: the next position to write
    behind: Tensor  # [B] bool: right behind a number, if digits are kept in view
    powers: Tensor  # `POWERS`
    cache: Any = None  # key-value cache of the transformer

    @classmethod
    def of(cls, model: Any, ids: Tensor, values: Tensor | None, mask: Tensor | None, room: int, pad: int) -> Buffers:
        """Buffers for a prompt [B,T] with T' = room positions, without a cache. Arguments as in `generate`."""
        config, device, (b, prompt) = model.config, ids.device, ids.shape
        values = torch.zeros_like(ids) if values is None else values.to(device)
        mask = torch.ones_like(ids) if mask is None else mask.to(device)
        given = ((ids, pad), (values.double(), 0.0), (mask.bool(), True))
        all_ids, all_values, real = (F.pad(each, (0, room - prompt), value=rest) for each, rest in given)
        positions = positions_in(real)
        is_number = (all_ids == config.num_token_id) & real
        head = model.action.number_head
        last = torch.arange(b, device=device) * room + prompt - 1
        memory = head.memory(all_ids, is_number, all_values, positions, last)
        numbers = empty_numbers(all_values, head, Intervals.from_dict(config.calibration))
        none, zero = torch.zeros(b, dtype=torch.bool, device=device), torch.zeros_like(ids[:, 0])
        at, kept = torch.tensor([prompt], device=device), model.features.embedding.digit_rows
        behind = ends_in_number(is_number, all_values, at - 1) if kept else none.clone()
        return cls(all_ids, numbers, real, positions, memory, none, zero, at, behind, POWERS.to(device))

    def tensors(self) -> list[Tensor]:
        """All tensors except those of the cache."""
        return [each for each in (*vars(self).values(), *vars(self.numbers).values()) if isinstance(each, Tensor)]

    def inside(self, kept: Buffers) -> Buffers:
        """Copy these contents into the memory of `kept`, which has the same shapes."""
        for memory, own in zip(kept.tensors(), self.tensors(), strict=True):
            memory.copy_(own)
        found: dict[str, Any] = {name: each for name, each in vars(kept.numbers).items() if isinstance(each, Tensor)}
        return replace(kept, numbers=replace(self.numbers, **found))

    @property
    def shape(self) -> tuple[object, ...]:
        """Shapes, dtypes and devices of all tensors."""
        return tuple((each.shape, each.dtype, each.device) for each in self.tensors())


@dataclass
class Kept:
    """State that a model keeps after a generation with a static cache, for the next one of the same shape: buffers,
    whose addresses are fixed in CUDA graphs, and compiled steps. A copy of the model starts without it."""

    buffers: Buffers | None = None
    dtype: torch.dtype | None = None
    # Random numbers of a step, drawn before it, by width and whether they are of words
    ahead: dict[tuple[int, bool], Tensor] = field(default_factory=dict)
    near: Tensor | None = None  # W_cls in bf16
    steps: dict[object, Callable[..., Any]] = field(default_factory=dict)  # compiled steps by settings

    @classmethod
    def of(cls, model: Any) -> Kept:
        """Take the kept state from this model. Empty at first, and while a different thread generates."""
        found = vars(model).pop("kept_decoding", None)
        return found if isinstance(found, cls) else cls()

    def __deepcopy__(self, memo: Any) -> Kept:
        return Kept()

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()

    def take(self, new: Buffers, layers: Sequence[str], dtype: torch.dtype) -> Buffers:
        """Move `new` into persistent memory, with an empty static cache in this dtype. layers: the type of each.

        Layers with a sliding window also keep all positions, and the mask hides those outside the window. The sliding
        window layer of transformers counts positions on the host, which would recompile each step.
        """
        if self.buffers is None or (self.buffers.shape, self.dtype) != (new.shape, dtype):
            self.dtype = dtype
            self.steps.clear()
            self.ahead.clear()
            self.near = None
            room = new.ids.shape[1]
            made: list[Any] = [
                LinearAttentionLayer() if "linear" in each else StaticLayer(max_cache_len=room) for each in layers
            ]
            self.buffers = replace(new, cache=Cache(layers=made))
            stay(*self.buffers.tensors())
            return self.buffers
        self.buffers.cache.reset()
        self.buffers.cache.beside_state = None
        return new.inside(self.buffers)

    def random(self, rows: int, key: tuple[int, bool], device: torch.device) -> Tensor:
        """Memory [rows,width] fp32 for the random numbers of a step. key: (width, whether they are of words)."""
        if key not in self.ahead:
            self.ahead[key] = torch.empty(rows, key[0], device=device)
            stay(self.ahead[key])
        return self.ahead[key]

    def copied(self, weight: Tensor) -> Tensor:
        """weight in bf16. Copied at each call, as training may have changed the weight."""
        if self.near is None or (self.near.shape, self.near.device) != (weight.shape, weight.device):
            self.near = torch.empty_like(weight, dtype=torch.bfloat16)
            stay(self.near)
        return self.near.copy_(weight)


def stay(*tensors: Tensor) -> None:
    """Mark the addresses of these tensors as static, so that a CUDA graph reads and writes them in place."""
    for tensor in tensors:
        mark_static_address(tensor)


class CompiledSteps:
    """Calls functions of a `_Continuation`. Each is compiled once for the settings it depends on."""

    def __init__(self, kept: dict[object, Callable[..., Any]], key: str, options: dict[str, Any]) -> None:
        self.kept, self.key, self.options = kept, key, options
        self.called: set[object] = set()  # in this generation

    @classmethod
    def of(cls, kept: Kept, settings: Settings, padded: bool, model: Any, device: torch.device) -> CompiledSteps | None:
        """Compiled steps for a generation. None if compilation is off: on a CPU without a compile_config, with
        disable_compile, and if the weights are on two or more devices."""
        config = settings.compile_config
        if settings.disable_compile or (device.type != "cuda" and config is None):
            return None
        if {weight.device for weight in model.parameters()} != {device}:
            return None
        given = config if isinstance(config, dict) else {} if config is None else config.to_dict()
        options = {"fullgraph": True, "dynamic": False, **AS_TRANSFORMERS}
        options |= {name: value for name, value in given.items() if value is not None}
        # Compiled code does not depend on draws, lengths and processors, so these must not be part of the key
        same: dict[str, Any] = {"seed": None, "generator": None, "logits_processor": None, "max_new_tokens": 0}
        return cls(kept.steps, f"{padded} {replace(settings, **same)}", options)

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call function(*args) compiled. If compilation fails, warn once and call it directly."""
        place = function, self.key
        if place not in self.kept:
            # torch limits and caches compilations per code object, so each gets a copy with a different name
            assert isinstance(function, FunctionType)
            code = function.__code__.replace(co_name=f"{function.__name__}_{len(self.kept)}")
            own = FunctionType(code, function.__globals__, code.co_name)
            self.kept[place] = torch.compile(own, **self.options)
        try:
            if place in self.called:  # within a generation the guards of the first call stay valid
                with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                    return self.kept[place](*args)
            found = self.kept[place](*args)
            self.called.add(place)
            return found
        except TorchDynamoException as error:
            notes.warning(f"{function.__name__} is not compiled: {str(error).strip().splitlines()[0]}")
            self.kept[place] = function
            return function(*args)


class Ending:
    """Returns whether all rows have ended.

    On a GPU an asynchronous copy brings the answer of a step to the host, which reads it LATE steps later. So the GPU
    never waits for the host, and the host waits only if it is LATE steps ahead. Up to LATE further steps write padding.
    at_once: read the answer of the last step, as on a CPU.
    """

    def __init__(self, done: Tensor, at_once: bool) -> None:
        """done: [B] bool, updated in place by the steps."""
        self.done, self.step = done, 0
        self.late = done.is_cuda and not at_once
        if self.late:
            self.answers = torch.zeros(LATE, dtype=torch.bool, pin_memory=True)
            self.copied = [torch.cuda.Event() for _ in range(LATE)]

    def __call__(self) -> bool:
        if not self.late:
            return bool(self.done.all())
        slot, ended = self.step % LATE, False
        if self.step >= LATE:
            self.copied[slot].synchronize()
            ended = bool(self.answers[slot])
        self.answers[slot].copy_(self.done.all(), non_blocking=True)
        self.copied[slot].record()
        self.step += 1
        return ended
