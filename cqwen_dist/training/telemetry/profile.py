"""A trace of some steps (`train.profile`): torch's profiler on rank 0, and on a GPU a history of its memory.

RUN/profile/trace.json      Chrome's format, for https://ui.perfetto.dev
RUN/profile/memory.pickle   on a GPU, for https://pytorch.org/memory_viz
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from cqwen_dist.config.schema import Trace

COSTLIEST = 5  # operators to name


@dataclass
class StepProfile:
    """Traces the steps of a window, and the trainer's work between them."""

    window: Trace | None  # None traces nothing
    folder: Path  # for the trace
    on_gpu: bool
    say: Callable[[str], None]
    _running: profile | None = None

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Take optimizer step `step`, from 1, in the body. A resumed run traces only a window that is all ahead."""
        if self.window is not None and step == self.window.start:
            if self.on_gpu:
                torch.cuda.memory._record_memory_history()
            self._running = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self.on_gpu])
            self._running.start()
        yield
        if self.window is not None and step == self.window.start + self.window.steps - 1:
            self.close()

    def close(self) -> None:
        """Write the trace, if one has begun, and name the operators that took longest themselves."""
        if (running := self._running) is None:
            return
        self._running, on_gpu = None, self.on_gpu
        if on_gpu:
            torch.cuda.synchronize()
        running.stop()
        self.folder.mkdir(exist_ok=True)
        running.export_chrome_trace(str(self.folder / "trace.json"))
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        found = [event for event in running.key_averages() if event.device_type == DeviceType.CPU]
        costs = {e.key: (e.self_device_time_total if on_gpu else e.self_cpu_time_total, e.count) for e in found}
        total = sum(cost for cost, _ in costs.values()) or 1.0
        self.say(f"profile: {self.folder}; the costliest operators:")
        for name, (cost, count) in sorted(costs.items(), key=lambda item: -item[1][0])[:COSTLIEST]:
            self.say(f"  {name}: {cost / total:.0%}, {cost / 1e6:.3g} s in {count:,} calls")
