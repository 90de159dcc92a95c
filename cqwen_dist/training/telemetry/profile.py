"""A trace of some steps (`train.profile`): torch's profiler on rank 0, and on a GPU a history of its memory.

RUN/profile/trace.json      Chrome's format, for https://ui.perfetto.dev
RUN/profile/memory.pickle   on a GPU, for https://pytorch.org/memory_viz
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from cqwen_dist.config.training import Trace
from cqwen_dist.run.files import PROFILE

COSTLIEST = 5  # operators to name


class StepProfile:
    """Traces the steps of a window, and the trainer's work between them."""

    def __init__(self, window: Trace | None, folder: Path, device: torch.device, say: Callable[[str], None]) -> None:
        """window: None traces nothing. folder: the run's."""
        self._window, self._folder, self._say = window, folder / PROFILE, say
        self._on_gpu = device.type == "cuda"
        self._running: profile | None = None

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Take optimizer step `step`, from 1, in the body. A resumed run traces only a window that is all ahead."""
        if self._window is not None and step == self._window.start:
            if self._on_gpu:
                torch.cuda.memory._record_memory_history()
            self._running = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._on_gpu])
            self._running.start()
        yield
        if self._window is not None and step == self._window.start + self._window.steps - 1:
            self.close()

    def close(self) -> None:
        """Write the trace, if one has begun, and name the operators that took longest themselves."""
        if (running := self._running) is None:
            return
        self._running, on_gpu = None, self._on_gpu
        if on_gpu:
            torch.cuda.synchronize()
        running.stop()
        self._folder.mkdir(exist_ok=True)
        running.export_chrome_trace(str(self._folder / "trace.json"))
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(self._folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        found = [event for event in running.key_averages() if event.device_type == DeviceType.CPU]
        costs = {e.key: (e.self_device_time_total if on_gpu else e.self_cpu_time_total, e.count) for e in found}
        total = sum(cost for cost, _ in costs.values()) or 1.0
        self._say(f"profile: {self._folder}; the costliest operators:")
        for name, (cost, count) in sorted(costs.items(), key=lambda item: -item[1][0])[:COSTLIEST]:
            self._say(f"  {name}: {cost / total:.0%}, {cost / 1e6:.3g} s in {count:,} calls")
