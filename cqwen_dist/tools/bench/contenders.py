"""Contenders of a benchmark in processes of their own: they warm up together, then each is timed alone.

Compiling takes minutes and needs the CPU, timing takes seconds and needs the whole GPU. So the contenders of a group
compile and warm up at the same time, and each one is measured after all others are ready and idle. A contender that
fails, hangs or runs out of memory costs its own row and nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Work = Callable[[], Iterator[Any]]  # yields once when it is warm, then its result, a JSON-ready value


class Contender:
    """One work in a forked process, the leader of a process group that ends as a whole.

    The parent must not have used CUDA: a forked process cannot.
    """

    def __init__(self, name: str, work: Work, log: Path) -> None:
        self.name, self.failed = name, ""
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self.process = fork.Process(target=_serve, args=(work, theirs, log))
        self.process.start()
        theirs.close()

    def next(self, seconds: float) -> Any:
        """The next value that the work yields, within so many seconds; None after it failed, `failed` says why."""
        if not self.failed:
            try:
                if self.pipe.poll(max(0.0, seconds)):
                    kind, value = self.pipe.recv()
                    if kind == "value":
                        return value
                    self.failed = value
                else:
                    self.failed = "stopped: out of time"
            except EOFError:
                self.process.join(5)
                self.failed = f"ended with exit code {self.process.exitcode}"
        self.end()
        return None

    def go(self) -> None:
        """Let a warm work continue."""
        self.pipe.send("go")

    def end(self) -> None:
        """Kill the process and everything that it started."""
        if self.process.pid is not None:
            for kill in (os.killpg, os.kill):  # a process killed before it led a group is killed by its own number
                try:
                    kill(self.process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.process.join(10)


def take_turns(
    works: Mapping[str, Work], log: Path, warm_s: float, timed_s: float, left: Callable[[], float]
) -> Iterator[tuple[str, Any, str]]:
    """(name, result, "") or (name, None, why there is none) of each work, in order.

    warm_s, timed_s: limits of warming up (all together) and of measuring (each). left: seconds until all must end.
    """
    contenders = [Contender(name, work, log) for name, work in works.items()]
    try:
        until = time.monotonic() + min(warm_s, left())
        for contender in contenders:
            contender.next(until - time.monotonic())
        for contender in contenders:
            result = None
            if not contender.failed:
                contender.go()
                result = contender.next(min(timed_s, left()))
                contender.end()  # frees its memory on the GPU before the next one is timed
            yield contender.name, result, contender.failed
    finally:
        for contender in contenders:
            contender.end()


def _serve(work: Work, pipe: Connection, log: Path) -> None:
    """Run in the child: its output goes to the log, its values to the parent."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with log.open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
        try:
            values = work()
            next(values)
            pipe.send(("value", "warm"))
            pipe.recv()
            pipe.send(("value", next(values)))
        except BaseException as error:
            import traceback

            traceback.print_exc()
            sys.stdout.flush()  # the parent ends this process as soon as it hears why
            lines = str(error).strip().splitlines() or [""]
            pipe.send(("failed", f"{type(error).__name__}: {lines[0][:200]}"))
        sys.stdout.flush()
    os._exit(0)  # no clean-up of what the parent had: threads, GPU contexts, temporary folders
