"""Measures the parts of a training step with timestamps, and traces a few steps with torch's profiler.

Timestamps are CUDA events, which do not synchronise, or clock readings on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.rig import Rig

STEPS = 2
ROWS = 40
# Profiler names of the calls that block the host until the device is done.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


class Marks:
    """The timestamps in a step, each with the name of the part that ends there."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.found: list[tuple[str, Any]] = []

    def now(self) -> Any:
        """A timestamp, taken without synchronising with the device."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, part: str) -> None:
        """Records the end of `part`, which started at the end of the previous part."""
        self.found.append((part, self.now()))

    def seconds(self) -> dict[str, float]:
        """Seconds per part since the first mark. Synchronises with the device."""
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


class Ends(Protocol):
    """Receives the end of each part: `Marks` or `launches.Launches`."""

    def end(self, part: str) -> None: ...


@contextmanager
def marked(rig: Rig, marks: Ends) -> Iterator[None]:
    """Makes the rig's steps call `marks.end` after each part.

    `data` is the time before the first forward pass. `rest` is the time that belongs to no named part.
    """
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
        if not begun[0]:  # with cached z, no forward pass has ended the part `data`
            marks.end("data")
            begun[0] = True
        return loss(*args, **options)

    def marked_backward(*args: Any, **options: Any) -> None:
        marks.end("heads")
        graph = rig.engine.features_train
        backward(*args, **options)
        marks.end("backbone_backward" if graph else "heads")

    def marked_step() -> float:
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


def device_counts(step: Callable[[], object]) -> dict[str, float]:
    """Profiles one step on CUDA and returns {kernels, host_waits, busy_s}, including compiled regions.

    busy_s: total kernel seconds. If the step takes longer, the device waits for kernel launches.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
        step()
        torch.cuda.synchronize()
    averages = traced.key_averages()
    return _counts(averages, 1) | {"busy_s": sum(_kernel_us(event) for event in averages) / 1e6}


def _kernel_us(event: Any) -> float:
    """Microseconds of a kernel event, 0 for other events: an operation repeats the time of the kernels it launched."""
    return event.self_device_time_total if event.device_type == DeviceType.CUDA else 0.0


def _counts(averages: Any, steps: int) -> dict[str, float]:
    """Launches and waits per step, without the final wait from the benchmark."""
    waits = sum(event.count for event in averages if event.key in WAITS)
    kernels = sum(event.count for event in averages if event.key in LAUNCHES)
    return {"kernels": kernels / steps, "host_waits": max(0, waits - 1) / steps}


def profile_steps(step: Callable[[], object], folder: Path, device: torch.device) -> dict[str, Any]:
    """Trace `STEPS` steps into `folder`: trace.json.gz (chrome://tracing, Perfetto) and table.txt.

    Returns {trace, table, host_waits, kernels, device_s, top}: the two files, the waits, kernel launches and busy
    seconds per step, and the first table rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as traced:
        for _ in range(STEPS):
            step()
        if cuda:
            torch.cuda.synchronize()
    trace, text = folder / "trace.json.gz", folder / "table.txt"
    traced.export_chrome_trace(str(trace))
    averages = traced.key_averages()
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    shown = averages.table(sort_by=key, row_limit=ROWS, max_name_column_width=60)
    text.write_text(shown, encoding="utf-8")
    ordered = sorted(averages, key=lambda event: -getattr(event, key))
    return {
        "trace": str(trace),
        "table": str(text),
        **_counts(averages, STEPS),
        "device_s": sum(_kernel_us(e) if cuda else e.self_cpu_time_total for e in averages) / STEPS / 1e6,
        "top": [
            {"name": e.key[:80], "ms": getattr(e, key) / STEPS / 1e3, "count": e.count / STEPS} for e in ordered[:ROWS]
        ],
    }
