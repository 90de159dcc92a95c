"""A watchdog against hangs: a rank that makes no progress writes its stacks and exits.

A collective's timeout ends the waiting ranks. It does not end the rank that hangs, and does not show where it hangs. So
each rank reports progress. After 0.9 timeouts without progress, a rank writes the stacks of all threads to
`stacks/rank-N.txt` in the run folder and exits with code 1, before the collective's timeout ends any rank. The clock is
the C thread of `faulthandler`: it also fires during a call that never returns or keeps the GIL. Just before, a Python
thread prints a line, because srun and torchrun print none. Setup may take long (a download), so until the first
report the rank only writes its stacks and continues; the report deletes them.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cqwen_dist.run.files import STACKS, not_followed

SHARE = 0.9  # of the collective timeout
TOLD = 0.97  # of that time: when the rank announces that it will end


class HangWatch:
    """The clock of one rank; idle until `watching`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._file: Any = None
        self._last = 0.0

    @contextmanager
    def watching(
        self, run_dir: Path, rank: int, timeout_s: float | None, say: Callable[[str], object] = lambda text: None
    ) -> Iterator[None]:
        """Inside, call `alive` at least every 0.9 timeouts, counted from its first call. None: no watch.

        say: gets a line just before a hanging rank ends.
        """
        if timeout_s is None:
            yield
            return
        path = run_dir / STACKS / f"rank-{rank}.txt"
        path.parent.mkdir(exist_ok=True)
        with open(path, "w", encoding="utf-8", opener=not_followed) as file, ExitStack() as held:
            try:
                self._file, self._seconds, self._last = file, SHARE * timeout_s, 0.0
                faulthandler.dump_traceback_later(self._seconds, file=file)
                ended = threading.Event()
                held.callback(ended.set)

                def tell() -> None:
                    while not ended.wait((1 - TOLD) / 2 * self._seconds):
                        if self._last and time.monotonic() - self._last > TOLD * self._seconds:
                            seconds = f"{TOLD * self._seconds:.0f} s"
                            say(f"rank {rank} has made no progress for {seconds} and ends; stacks: {path}")
                            return

                threading.Thread(target=tell, name="hang", daemon=True).start()
                yield
            finally:  # also if a signal stops the run: the C thread would still end the process
                faulthandler.cancel_dump_traceback_later()
                self._seconds = 0.0
                if not path.stat().st_size:
                    path.unlink()

    def alive(self) -> None:
        """Report progress and restart the clock. Cheap: it resets the clock at most a hundred times per timeout."""
        now = time.monotonic()
        if self._seconds and now - self._last > 0.01 * self._seconds:
            if not self._last:
                self._file.truncate(self._file.seek(0))
            self._last = now
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)
