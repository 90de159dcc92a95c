"""A rank that hangs: when no rank gets on, each writes where it stands and ends.

A collective's timeout ends the ranks that wait, but not the one they wait for, and tells nothing of it. So every rank
says now and then that it gets on; where it has not for nearly the timeout, its stacks (every thread's) are written to
`stacks/rank-N.txt` in the run's folder and it exits with code 1. The ranks go in step, so all of them do within the
timeout, before the collective's own ends any of them. The clock runs in a thread of C (`faulthandler`): also a call
that never returns, or holds Python's lock, is seen.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cqwen_dist.run.files import STACKS

SHARE = 0.9  # of the collective timeout


class HangWatch:
    """The clock of one rank; idle until `watching`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._file: object = None
        self._last = 0.0

    @contextmanager
    def watching(self, run_dir: Path, rank: int, timeout_s: float | None) -> Iterator[None]:
        """Inside, from the first `alive` on, it has to be called at least every 0.9 timeouts. No timeout, no watch."""
        if timeout_s is None:
            yield
            return
        path = run_dir / STACKS / f"rank-{rank}.txt"
        path.parent.mkdir(exist_ok=True)
        try:
            with path.open("w", encoding="utf-8") as file:
                self._file, self._seconds, self._last = file, SHARE * timeout_s, 0.0
                try:
                    yield
                finally:
                    faulthandler.cancel_dump_traceback_later()
                    self._seconds = 0.0
        finally:  # also of a run that was told to stop
            if not path.stat().st_size:
                path.unlink()

    def alive(self) -> None:
        """This rank gets on: the clock starts again. Cheap: it is wound at most a hundred times a timeout."""
        now = time.monotonic()
        if self._seconds and now - self._last > 0.01 * self._seconds:
            self._last = now
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)  # type: ignore[arg-type]


def stacks_of(run_dir: Path) -> list[Path]:
    """The files that ranks which hung have left."""
    return sorted(path for path in (run_dir / STACKS).glob("rank-*.txt") if path.stat().st_size)
