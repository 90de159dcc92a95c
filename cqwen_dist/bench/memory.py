"""Peak memory of a piece of work, on a CUDA device or of this process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch


def peak_growth_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes that ``work`` held at once beyond what was held before it.

    CUDA: from torch's allocator. CPU: from the process's resident high-water mark, so scratch space inside the
    maths library counts too; Linux only, None elsewhere.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # else freed blocks still count as resident before the work
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        before = _resident("VmRSS")
    except OSError:
        work()
        return None
    work()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")
