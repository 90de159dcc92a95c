"""Graceful stop: SIGTERM, SIGUSR1, SIGINT and SIGHUP set a flag, and all ranks act on it at the same point.

If the handler stopped a rank at once, the ranks would stop at different points, some inside a collective. So the
handler only sets a flag, and all ranks check it at the same points:

    before an optimizer step      with the exchange of token counts; no rank takes that step (`training.step`)
    before other forward passes   `StopFlag.agreed`, one small all-reduce (evaluation, calibration, building a cache)
    in work without collectives   `StopFlag.interruptible`: the signal ends it at once (setup, waiting for data)
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from cqwen_dist.parallel.collectives import Stopped, is_communication, sum_over
from cqwen_dist.parallel.launcher import SIGNALS, taken

APART_S = 5.0  # longest delay in seconds between machines, until all ranks receive the signal of one request


class StopFlag:
    """Whether this rank received a stop request, and by which signal."""

    def __init__(self, job: "StopFlag | None" = None) -> None:
        """job: the flag of all runs of this process, if this is the flag of one of them."""
        self._own: str | None = None  # the signal's name, or a different reason
        self._job = job
        self._interrupt = False

    @property
    def reason(self) -> str | None:
        """Why this rank is to stop; None: it is not."""
        return self._own or (None if self._job is None else self._job.reason)

    @contextmanager
    def installed(self) -> Iterator["StopFlag"]:
        """Inside, the signals set the flag. A second Ctrl-C raises KeyboardInterrupt.

        Also unblocks the signals. `cqwen launch` starts its ranks with SIGUSR1 blocked: a signal during the imports
        waits for this handler instead of killing the rank.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self  # Python handles signals only in the main thread
            return
        before = {number: signal.signal(number, self._handle) for number in taken()}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.reason is not None:  # `cqwen launch` repeats the signal until its ranks have ended
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def ask(self, reason: str) -> None:
        """Request a stop of this rank. The first reason is kept."""
        self._own = self._own or reason

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and self.reason == name:
            raise KeyboardInterrupt
        self.ask(name)
        if self._interrupt:
            self._interrupt = False
            raise Stopped(name)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, a signal raises `Stopped` on this rank at once. After an earlier signal, entering raises it."""
        heard = self._job or self
        heard._interrupt = True  # before the question: a signal after it raises
        try:
            if self.reason is not None:
                raise Stopped(self.reason)
            with self.excusing_lost_ranks():
                yield
        finally:
            heard._interrupt = False

    @contextmanager
    def excusing_lost_ranks(self) -> Iterator[None]:
        """Turn a communication failure inside into `Stopped` if this rank receives a stop request soon after.

        The lost rank received its signal a little earlier, in an interruptible part, and left without waiting.
        """
        try:
            yield
        except RuntimeError as error:
            deadline = time.monotonic() + APART_S
            while is_communication(error) and time.monotonic() < deadline:
                if self.reason is not None:
                    raise Stopped(self.reason) from None
                time.sleep(0.05)
            raise

    def agreed(self, device: torch.device) -> None:
        """Raise `Stopped` on all ranks if any rank received a stop request. Collective over the world."""
        stops = torch.tensor([self.reason is not None], device=device, dtype=torch.int32)
        if bool(sum_over(stops).item()):
            raise Stopped(self.reason)
