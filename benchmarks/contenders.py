"""Runs benchmark contenders in separate processes: they warm up in parallel and are timed one by one.

Compiling takes minutes and needs the CPU. Timing takes seconds and needs an idle GPU. So the contenders of a group
compile and warm up at the same time, and timing starts when all are ready. A contender that fails, hangs or runs out
of memory loses only a row in the table.
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

Work = Callable[[], Iterator[Any]]  # yields once when warm, then yields a JSON-ready result


class Contender:
    """A work in a forked process, which leads a process group so that `end` also kills its children.

    The parent must not have used CUDA: a forked process cannot initialise it again.
    """

    def __init__(self, name: str, work: Work, log: Path) -> None:
        self.name, self.failed = name, ""
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self.process = fork.Process(target=_serve, args=(work, theirs, log))
        self.process.start()
        theirs.close()

    def next(self, seconds: float) -> Any:
        """The next value from the work; None if it failed or took more than `seconds`, with the reason in `failed`."""
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
        """Kill the process and all children."""
        if self.process.pid is not None:
            for kill in (os.killpg, os.kill):  # before the child has called setsid, no group exists: kill it by pid
                try:
                    kill(self.process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.process.join(10)


def take_turns(
    works: Mapping[str, Work], log: Path, warm_s: float, timed_s: float, left: Callable[[], float]
) -> Iterator[tuple[str, Any, str]]:
    """Yields (name, result, "") or (name, None, reason of the failure) for each work, in order.

    warm_s: the limit for the common warm-up. timed_s: the limit for each measurement. left: returns the seconds that
    remain for everything.
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
                contender.end()  # free GPU memory before the next one is timed
            yield contender.name, result, contender.failed
    finally:
        for contender in contenders:
            contender.end()


def _serve(work: Work, pipe: Connection, log: Path) -> None:
    """Runs `work` in the child, with output to the log, and sends the values to the parent."""
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
            sys.stdout.flush()  # flush first: the parent kills this process as soon as it receives the reason
            lines = str(error).strip().splitlines() or [""]
            pipe.send(("failed", f"{type(error).__name__}: {lines[0][:200]}"))
        sys.stdout.flush()
    os._exit(0)  # skip exit handlers: they would clean up the parent's threads, GPU contexts and temporary folders
