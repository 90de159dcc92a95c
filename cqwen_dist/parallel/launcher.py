"""Between a launcher and its ranks: which signals mean "stop", and that no rank outlives its launcher (no torch).

When the launcher ends, in whatever way, its ranks stop in order. A rank's parent is DeepSpeed's launcher, whose parent
is DeepSpeed's runner, whose parent is `cqwen launch`. The kernel signals the rank when its parent ends; a thread of the
rank watches `cqwen launch`.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time

LAUNCHER = "CQWEN_LAUNCHER"  # the process number of `cqwen launch`, for the ranks on its machine
LAST_S = 600.0  # for the last checkpoint; then the process is killed
_PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # "stop in order"


def taken() -> tuple[signal.Signals, ...]:
    """Those of SIGNALS that are acted on: all, but under `nohup` not SIGHUP."""
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
