"""What a launcher and its ranks share: a port, the signals that mean "stop", and their end (no torch).

When the launcher ends, for any reason, its ranks stop in order. A rank's parent is DeepSpeed's launcher; its parent is
DeepSpeed's runner; its parent is `cqwen launch`. The kernel signals the rank when its parent ends; a thread of the
rank waits for the end of `cqwen launch`.
"""

from __future__ import annotations

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

LAUNCHER = "CQWEN_LAUNCHER"  # the process number of `cqwen launch`, for the ranks on its machine
LAST_S = 600.0  # seconds for the last checkpoint; then the process is killed
_PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # "stop in order"


def free_port() -> int:
    """A port of this machine that nothing listens on, for the ranks' rendezvous, some seconds later.

    Below those that Linux gives to any connection, which could take it until then.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_768)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("", port))
            return port


def taken() -> tuple[signal.Signals, ...]:
    """The SIGNALS that are acted on: all of them, but under `nohup` not SIGHUP."""
    return tuple(n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)


def end_with_launcher() -> None:
    """Send this process SIGTERM when its launcher has ended; without a launcher do nothing."""
    named = os.environ.pop(LAUNCHER, "")
    if not named.isdecimal() or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    threading.Thread(target=_watch, args=(int(named),), name="launcher", daemon=True).start()


def _watch(launcher: int) -> None:
    try:
        handle = os.pidfd_open(launcher)
    except ProcessLookupError:
        pass
    except (OSError, AttributeError):
        return  # an old kernel
    else:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_S)
    os.kill(os.getpid(), signal.SIGKILL)
