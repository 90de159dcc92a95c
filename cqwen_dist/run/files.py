"""The files of a run's folder: their names, and writing one so that a reader sees it whole or not at all (no torch)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cqwen_dist.config.errors import UserError

CONFIG = "config.yaml"  # as resolved
ENVIRONMENT = "environment.json"  # packages, machine, commit, ranks
START = "start.json"  # the start: its kind, statistics of the data, calibration, first evaluation
START_TENSORS = "start.safetensors"  # the abduction and the embedding at the start: what KL is measured against
STATUS = "status.json"
LOCK = "lock"
CHANGES = "changes.jsonl"  # of the config, since the run began
ARCHIVED = "archived-"  # folders of runs that were here before (run.resume: restart)
METRICS = "metrics.jsonl"  # one line an optimizer step
ALARMS = "alarms.jsonl"
REPORT = "report.html"
EVALUATIONS = "evaluations"  # what a report draws
PROBE = "probe_start.safetensors"  # in `evaluations`
CHECKPOINTS = "checkpoints"
LATEST = "latest"  # the path of the newest checkpoint, moved after it is whole
BEST = "best"  # beside a run: the path of its checkpoint that `cqwen fit` predicts with
MANIFEST = "manifest.json"  # of a checkpoint, and of a feature cache
STATE = "state.json"  # of a checkpoint
FEATURE_CACHE = "feature_cache"
DIGESTS = "digests"  # of the base's files, remembered while they do not change
STACKS = "stacks"  # of ranks that hung
WANDB_ID = "wandb_id"
TENSORBOARD = "tensorboard"
SLURM = "slurm"  # scripts, logs, history
HISTORY = "history.jsonl"  # in `slurm`: starts and ends

# Error numbers of a disk that takes nothing until someone mends it, and of a file system that is not reachable.
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM)
_AWAY = ("EIO", "ESTALE", "ETIMEDOUT", "ENOTCONN", "EHOSTDOWN", "EHOSTUNREACH", "EREMOTEIO")
AWAY = tuple(getattr(errno, name) for name in _AWAY if hasattr(errno, name))  # some systems lack some


def words_of_disk(error: Exception, place: Path) -> tuple[str, str, bool]:
    """(path, message, whether the disk is not reachable) of an OSError or a SafetensorError, which has no number."""
    message = getattr(error, "strerror", None) or str(error)
    return str(getattr(error, "filename", None) or place), message, getattr(error, "errno", None) in AWAY


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to; the file then replaces `path`, and survives a power loss.

    Where the body raises, `path` is unchanged and the temporary file is deleted.
    """
    # A random name: containers on several hosts share process numbers, and any rank may write a status.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def appearing(out: Path, key: str) -> Iterator[Path]:
    """Yields a temporary folder that becomes `out` at the end; it is deleted after an error.

    Raises `UserError` for `key` where no folder can be made there.
    """
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(key, str(out), f"a folder that can be made ({error.strerror})") from None
    try:
        yield partial
        if out.exists():
            out.rmdir()
        let_read(partial)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file: a reader sees either the whole old one or the whole new one, also after a power loss."""
    with written_whole(path) as partial, partial.open("x", encoding="utf-8") as file:
        file.write(text)


def read_small(path: Path) -> str:
    """A file's text. Raises OSError, also for a pipe or a folder: reading a pipe would wait for a writer."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
    return path.read_text(encoding="utf-8")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file or no object in it."""
    try:
        found = json.loads(read_small(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file; skips lines that a kill cut off, yields nothing without a file."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


def file_record(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def known_digest(path: Path, memo: Path) -> str:
    """SHA-256 of a file, remembered in the folder `memo` while the file's size and modification time stay."""
    stat = path.stat()
    is_now = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
    entry = memo / hashlib.sha256(is_now.encode()).hexdigest()[:24]
    if entry.is_file():
        known = entry.read_text(encoding="ascii")
        if len(known) == 64:
            return known
    found = str(file_record(path)["sha256"])
    if time.time_ns() - stat.st_mtime_ns > 2_000_000_000:  # a file that is still being written may keep its time
        with suppress(OSError):
            memo.mkdir(parents=True, exist_ok=True)
            write_atomically(entry, found)
    return found


def key_digest(key: dict[str, Any]) -> str:
    """A folder name for what a key of plain values describes."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk of a folder, which may not exist yet."""
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def let_read(path: Path) -> None:
    """Give a file, or a folder's files, the folder's read rights: safetensors lets the owner alone read them."""
    files = path.rglob("*") if path.is_dir() else [path]
    for file in files:
        if file.is_file() and not file.is_symlink():
            file.chmod(file.parent.stat().st_mode & 0o666)


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
