"""Peak memory of a process and its children (Linux)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from benchmarks.step_memory import status_bytes


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
        return status_bytes(pid, "RssAnon") / 2**20
    except OSError:
        return 0.0


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
