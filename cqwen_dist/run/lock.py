"""One command per run: a lock on the folder, held by rank 0 while it lives (no torch).

The kernel releases a lock (`flock`) when its process ends in any way. So a killed run needs no clean-up, and reused
process ids do no harm. But on some shared file systems such locks work only within one machine, or not at all. So the
file also names its holder's machine, and the holder touches the file every few seconds. If the kernel cannot know, a
file that is still touched means a running process; otherwise that machine has died.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.run.files import LOCK, not_followed, read_object

BEAT_S = 5.0
PATIENCE_BEATS = 4  # missed heartbeats after which a host counts as dead


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises `UserError` naming the holder if a different process has it."""
    path = run_dir / LOCK
    handle = not_followed(str(path), os.O_RDWR | os.O_CREAT)
    known = True  # whether the kernel would report a holder on this machine
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refusal(run_dir, read_object(path)) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            known = False
        # The kernel granted the lock. But if the file system locks per machine, a process on a different host may hold
        # it.
        holder = read_object(path)
        if holder and not (known and holder.get("boot") == _boot()) and _is_touched(path):
            raise _refusal(run_dir, holder)
        me = {"host": platform.node(), "boot": _boot(), "pid": os.getpid(), "since": round(time.time())}
        me["token"] = secrets.token_hex(8)  # containers often have equal host names and process ids
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(me).encode(), 0)
        if not known:  # another process may have written the file at the same time
            # Wait for a competing write to appear: the last writer's token wins.
            time.sleep(BEAT_S / 5)
            if (holder := read_object(path)).get("token") != me["token"]:
                raise _refusal(run_dir, holder)
        ended = threading.Event()

        def touch() -> None:
            while not ended.wait(BEAT_S):
                with suppress(OSError):  # a shared folder that is away for a moment
                    os.utime(handle)

        beat = threading.Thread(target=touch, name="lock", daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
            os.ftruncate(handle, 0)  # so other hosts need not wait for heartbeats
    finally:
        os.close(handle)


def _boot() -> str:
    """Identifies this boot of this machine: its processes see each other's locks. Host names may not be unique."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def _is_touched(path: Path) -> bool:
    """Whether a holder on a different host still touches the file. Host clocks differ, so only changes count."""
    before = path.stat().st_mtime_ns
    for _ in range(2 * PATIENCE_BEATS):
        time.sleep(BEAT_S / 2)
        if path.stat().st_mtime_ns != before:
            return True
    return False


def _refusal(run_dir: Path, holder: dict[str, Any]) -> UserError:
    found = Said(f"process {holder.get('pid', '?')} on {holder.get('host', 'this host')} at work in it")
    return UserError("run.dir", found, "a run that nobody works on, or another run.dir", str(run_dir))
