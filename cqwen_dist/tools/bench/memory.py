"""Measures peak memory: of a piece of work on CUDA or in this process, or of a process and its children (Linux)."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch


def peak_growth_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Peak bytes during ``work`` minus the bytes allocated before it.

    CUDA: from torch's allocator. CPU: from the resident high-water mark, so scratch space inside the maths library
    counts too; Linux only, None elsewhere.
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
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise freed blocks still count as resident before the work
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = _status_bytes("self", "VmRSS")
    except OSError:
        work()
        return None
    work()
    return _status_bytes("self", "VmHWM") - before


class MemoryWatch:
    """Tracks the peak anonymous memory (RssAnon) of a process and its descendants while open.

    It samples memory 20 times per second and looks for new processes twice per second. peaks: {pid: MiB}, root first.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self.peaks: dict[int, float] = {root: 0.0}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def root_mib(self) -> float:
        """The peak of the root process."""
        return self.peaks[self.root]

    @property
    def worker_mib(self) -> list[float]:
        """The peaks of the descendants, largest first."""
        return sorted((mib for pid, mib in self.peaks.items() if pid != self.root), reverse=True)

    def _watch(self) -> None:
        looked = 0.0
        while True:
            if time.monotonic() - looked > 0.5:
                looked = time.monotonic()
                self.peaks |= {pid: 0.0 for pid in _descendants(self.root) if pid not in self.peaks}
            for pid, peak in self.peaks.items():
                self.peaks[pid] = max(peak, _anonymous_mib(pid))
            if self._done.wait(0.05):
                return


def _anonymous_mib(pid: int) -> float:
    """RssAnon of a process in MiB; 0 if it has ended."""
    try:
        return _status_bytes(pid, "RssAnon") / 2**20
    except OSError:
        return 0.0


def _status_bytes(pid: int | str, field: str) -> int:
    """A field in /proc/PID/status in bytes. Raises OSError if it is missing."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/{pid}/status")


def _descendants(root: int) -> list[int]:
    """The children of `root`, and their children."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = (path / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        parents[int(path.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    found, more = [], [root]
    while more:
        more = [pid for pid, parent in parents.items() if parent in more]
        found += more
    return found
