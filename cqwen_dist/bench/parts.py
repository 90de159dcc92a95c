"""Where the time of a training step goes: timestamps between its parts, CUDA events (without waiting) or the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.bench.rig import Rig


class Marks:
    """Timestamps of a step in order, each with the name of the part that ends there."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.found: list[tuple[str, Any]] = []

    def now(self) -> Any:
        """A timestamp, taken without waiting for the device."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, part: str) -> None:
        """`part` ends now; it began when the previous one ended."""
        self.found.append((part, self.now()))

    def seconds(self) -> dict[str, float]:
        """Seconds of every part since the first mark. Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
        total: dict[str, float] = {}
        for (_, before), (part, after) in zip(self.found, self.found[1:], strict=False):
            total[part] = total.get(part, 0.0) + between(before, after)
        self.found.clear()
        return total


def between(before: Any, after: Any) -> float:
    """Seconds between two timestamps."""
    return float(before.elapsed_time(after)) / 1e3 if isinstance(before, torch.cuda.Event) else float(after - before)


@contextmanager
def marked(rig: Rig, marks: Marks) -> Iterator[None]:
    """Inside, the rig's steps leave marks. `data` is the time before the first forward pass, `rest` what remains."""
    engine, stepper = rig.engine, rig.stepper
    forward, backward, step, loss = engine.forward, engine.backward, engine.step, stepper._loss
    begun = [False]

    def marked_forward(*args: Any, **options: Any) -> Tensor:
        marks.end("rest" if begun[0] else "data")
        begun[0] = True
        z = forward(*args, **options)
        if z.requires_grad:
            z.register_hook(lambda gradient: marks.end("heads"))
        marks.end("backbone_forward")
        return z

    def marked_loss(*args: Any, **options: Any) -> Any:
        if not begun[0]:  # z was given, so no forward pass began the step
            marks.end("data")
            begun[0] = True
        return loss(*args, **options)

    def marked_backward(*args: Any, **options: Any) -> None:
        marks.end("heads")
        graph = rig.engine.features_train
        backward(*args, **options)
        marks.end("backbone_backward" if graph else "heads")

    def marked_step() -> Tensor:
        marks.end("rest")
        norm = step()
        marks.end("optimizer")
        begun[0] = False
        return norm

    engine.forward, engine.backward, engine.step = marked_forward, marked_backward, marked_step  # type: ignore
    stepper._loss = marked_loss  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.forward, engine.backward, engine.step = forward, backward, step  # type: ignore[method-assign]
        stepper._loss = loss  # type: ignore[method-assign]
