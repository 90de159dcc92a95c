"""Output folders of commands, such as an export: seen whole or not at all."""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cqwen_dist.config.errors import UserError
from cqwen_dist.run.files import let_read


@contextmanager
def appearing(out: Path, key: str) -> Iterator[Path]:
    """Yields a temporary folder that is renamed to `out` on success and deleted after an error.

    Also deletes the temporary folders of killed processes, since the kernel has released their locks. Raises
    `UserError` for `key` if the folder cannot be created.
    """
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(key, str(out), f"a folder that can be made ({error.strerror})") from None
    handle = os.open(partial, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks: its leftovers stay
        fcntl.flock(handle, fcntl.LOCK_EX)
        for left in out.parent.glob(f".{glob.escape(out.name)}.{8 * '[0-9a-f]'}.partial"):
            if left != partial:
                _delete_unlocked(left)
    try:
        yield partial
        if out.exists():
            out.rmdir()
        let_read(partial)
        partial.rename(out)
    finally:
        os.close(handle)
        shutil.rmtree(partial, ignore_errors=True)


def _delete_unlocked(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        with suppress(BlockingIOError):  # its process lives
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
