"""Compiled steps of fixed shapes, and detection of the end without waiting for the GPU.

For one token of a small model the kernel launches take longer than the kernels. torch.compile fuses kernels, and with
mode "reduce-overhead" a CUDA graph launches a full step at once.
On an H200 a static cache decodes 13 times as fast as a dynamic one at batch 1 (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers.utils import logging

from cqwen_dist.generate.buffers import Kept
from cqwen_dist.generate.generation_settings import Settings

LATE = 4  # steps by which the host may be ahead of the GPU
AS_TRANSFORMERS = {"mode": "reduce-overhead"}  # default of transformers' CompileConfig
notes = logging.get_logger(__name__)


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
