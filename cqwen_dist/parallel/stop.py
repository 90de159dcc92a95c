"""Stopping in order: SIGTERM, SIGUSR1, SIGINT and SIGHUP set a flag, and all ranks act on it together.

A handler that acts at once would stop the ranks in different places, some inside a collective. So the handler sets a
flag, which all ranks read in the same places:

    before an optimizer step   with the exchange of token counts; no rank takes that step (`training.step`)
    before a forward elsewhere `StopFlag.agreed`, one small all-reduce (evaluation, calibration, building a cache)
    where a rank works alone   `StopFlag.interruptible`: the signal ends it at once (setting up, waiting for data)
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from cqwen_dist.parallel.collectives import Stopped, is_communication, sum_over
from cqwen_dist.parallel.launcher import SIGNALS, taken

APART_S = 5.0  # seconds between the signals that ranks on several machines get for one request


class StopFlag:
    """Whether this rank was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.reason: str | None = None  # the signal's name, or what else asked for it
        self._interrupt = False

    @contextmanager
    def installed(self) -> Iterator[StopFlag]:
        """Inside, the signals set the flag. A second Ctrl-C raises KeyboardInterrupt.

        They are unblocked too: `cqwen launch` starts its ranks with SIGUSR1 blocked, so that a signal during the
        imports waits for this handler instead of ending them.
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
        """Tell this rank to stop, unless it was told to before."""
        self.reason = self.reason or reason

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
        """Inside, a signal raises `Stopped` at once, on this rank alone; an earlier signal does so on entering."""
        if self.reason is not None:
            raise Stopped(self.reason)
        self._interrupt = True
        try:
            with self.excusing_lost_ranks():
                yield
        finally:
            self._interrupt = False

    @contextmanager
    def excusing_lost_ranks(self) -> Iterator[None]:
        """Inside, a lost rank was told to stop a little earlier, if this rank is told to as well: `Stopped`.

        It was interrupted, so it did not wait for the others.
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
        """Raise `Stopped` on all ranks if any of them was told to stop. Collective over the world."""
        stops = torch.tensor([self.reason is not None], device=device, dtype=torch.int32)
        self.act_on(bool(sum_over(stops).item()))

    def act_on(self, anyone: bool) -> None:
        """Raise `Stopped` if anyone: any rank was told to stop."""
        if anyone:
            raise Stopped(self.reason or "another rank was told to stop")
