"""Peak memory of a piece of work, on a CUDA device or of this process; of a process and its children (Linux)."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
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
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise freed blocks still count as resident before the work
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = _status_bytes("self", "VmRSS")
    except OSError:
        work()
        return None
    work()
    return _status_bytes("self", "VmHWM") - before


class MemoryWatch:
    """While it is open, the peak anonymous memory (RssAnon) of a process and of everything it started.

    Memory is read 20 times a second, new processes are looked for twice a second. `peaks` {pid: MiB}, the root's first.
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
        """The first process's peak."""
        return self.peaks[self.root]

    @property
    def worker_mib(self) -> list[float]:
        """The others' peaks, largest first."""
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
    """RssAnon of a process in MiB; 0 for one that has ended."""
    try:
        return _status_bytes(pid, "RssAnon") / 2**20
    except OSError:
        return 0.0


def _status_bytes(pid: int | str, field: str) -> int:
    """A field of /proc/PID/status in bytes. Raises OSError without it."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/{pid}/status")


def _descendants(root: int) -> list[int]:
    """The processes that it started, and those that they started."""
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
