"""Shared by the launcher and its ranks, without torch: the rendezvous port, stop signals, the end of the launcher.

When the launcher ends for any reason, its ranks save and stop. The processes are `cqwen launch` -> DeepSpeed's launcher
-> rank; with a hostfile, DeepSpeed's runner and ssh come between. The kernel signals a rank when its parent ends. A
thread of the rank also waits for the end of `cqwen launch`, which is not its parent.
"""

import contextlib
import ctypes
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

LAUNCHER = "CQWEN_LAUNCHER"  # process id of `cqwen launch`, for the ranks on its machine
LAST_S = 600.0  # seconds for the last checkpoint; then the process is killed
_PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # "stop in order"


def free_port() -> int:
    """A free port of this machine for the rendezvous, which starts some seconds later.

    The port is below Linux's ephemeral range: a new connection cannot take it in the meantime.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_768)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("", port))
            return port


def taken() -> tuple[signal.Signals, ...]:
    """The signals to handle: all of SIGNALS, without SIGHUP under `nohup`."""
    return tuple(n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)


@contextlib.contextmanager
def holding_signals() -> Iterator[Callable[[], None]]:
    """Stop signals wait until the trainer listens. Yields a function to call after a stop, so that more do nothing.

    Otherwise one during the imports, or a repeated one while the process ends, would replace exit code 75. After an
    error, a launcher's signal must end the process at once. Ctrl-C acts as always.
    """
    held = [number for number in taken() if number != signal.SIGINT]
    after: dict[Any, Any] = {number: signal.signal(number, lambda number, frame: None) for number in held}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)  # `StopFlag.installed` unblocks them
    try:
        # SIG_IGN stays while Python shuts down, which resets its own handlers
        yield lambda: after.update(dict.fromkeys(held, signal.SIG_IGN))
    finally:
        for number, handler in after.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)


def end_with_launcher() -> None:
    """Send this process SIGTERM when its launcher ends. No effect without a launcher."""
    named = os.environ.pop(LAUNCHER, "")
    if not named.isdecimal() or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    threading.Thread(target=_watch, args=(int(named),), name="launcher", daemon=True).start()


def _watch(launcher: int) -> None:
    try:
        handle = os.pidfd_open(launcher)
    except ProcessLookupError:
        pass  # the launcher has ended already
    except (OSError, AttributeError):
        return  # an old kernel without pidfd
    else:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_S)
    os.kill(os.getpid(), signal.SIGKILL)
