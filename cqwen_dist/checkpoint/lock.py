"""One command a run: the folder's lock, held by rank 0 for as long as it lives (no torch).

The kernel knows who holds a lock (`flock`) and lets go of it when that process ends, however it ends: a killed run
needs no clean-up, and a process number that was given away again deceives nobody. Some shared file systems keep such
locks within one machine, so the file also says which host holds it, and its holder touches it every few seconds: from
another host, a file that is still being touched is a run at work, and one that is not is a host that died.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cqwen_dist.config import UserError
from cqwen_dist.config.errors import Said

LOCK = "lock"
BEAT_S = 5.0
PATIENCE_BEATS = 4  # how many missed beats of another host are its end


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the folder. Raises `UserError` where another process does, saying which."""
    path = run_dir / LOCK
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refusal(run_dir, _holder(path)) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        holder = _holder(path)
        if holder.get("host") not in (None, platform.node()) and _is_touched(path):
            raise _refusal(run_dir, holder)
        me = {"host": platform.node(), "pid": os.getpid(), "since": round(time.time())}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(me).encode(), 0)
        ended = threading.Event()
        beat = threading.Thread(target=_beat, args=(handle, ended), name="lock", daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
            os.ftruncate(handle, 0)  # nobody's: another host need not wait for beats
    finally:
        os.close(handle)


def _beat(handle: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        os.utime(handle)


def _holder(path: Path) -> dict[str, Any]:
    """Who wrote the file, or nobody."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_touched(path: Path) -> bool:
    """Whether the holder, on another host, still gives a sign; by the file alone, as clocks of hosts differ."""
    before = path.stat().st_mtime_ns
    for _ in range(2 * PATIENCE_BEATS):
        time.sleep(BEAT_S / 2)
        if path.stat().st_mtime_ns != before:
            return True
    return False


def _refusal(run_dir: Path, holder: dict[str, Any]) -> UserError:
    who = f"process {holder.get('pid', '?')} on {holder.get('host', 'this host')}"
    return UserError(
        "run.dir", Said(f"{who} at work in it"), "a run that nobody works on, or another run.dir", str(run_dir)
    )
