"""The anonymous memory (RssAnon) of a process and of all that it started, while it runs (Linux)."""

from __future__ import annotations

import threading
import time
from pathlib import Path


class MemoryWatch:
    """Peaks while it is open, looked at 20 times a second; new processes are looked for twice a second.

    Args: root: the first process's id. `peaks` {pid: MiB}, the root's first.
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
                self.peaks |= {pid: 0.0 for pid in _below(self.root) if pid not in self.peaks}
            for pid, peak in self.peaks.items():
                self.peaks[pid] = max(peak, anonymous_mib(pid))
            if self._done.wait(0.05):
                return


def anonymous_mib(pid: int) -> float:
    """RssAnon of a process in MiB; 0 for one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), 0.0)


def _below(root: int) -> list[int]:
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
