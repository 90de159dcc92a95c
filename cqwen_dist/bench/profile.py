"""A torch profiler trace of a few steps, and the profiler's table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 2
ROWS = 40
# The profiler's names of calls that make the host wait for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def profile_steps(step: Callable[[], object], folder: Path, device: torch.device) -> dict[str, Any]:
    """Trace `STEPS` steps into `folder`: trace.json.gz (chrome://tracing, Perfetto) and table.txt.

    Returns {trace, table, host_syncs, kernels, device_s, top}: the two files; waits for the device, kernel launches and
    busy seconds per step; the first rows of the table.
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
    waits = sum(event.count for event in averages if event.key in WAITS)
    kernels = sum(event.count for event in averages if event.key in ("cudaLaunchKernel", "cuLaunchKernelEx"))
    return {
        "trace": str(trace),
        "table": str(text),
        "host_syncs": max(0, waits - cuda) / STEPS,
        "kernels": kernels / STEPS,
        "device_s": sum(getattr(event, key) for event in averages) / STEPS / 1e6,
        "top": [
            {"name": e.key[:80], "ms": getattr(e, key) / STEPS / 1e3, "count": e.count / STEPS} for e in ordered[:ROWS]
        ],
    }
