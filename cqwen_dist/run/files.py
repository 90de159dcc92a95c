"""Files of a run folder: names, atomic writes (readers see a file complete or not at all), the run's environment."""

import errno
import fcntl
import glob
import hashlib
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from cqwen_dist.config.errors import Said, UserError

CONFIG = "config.yaml"  # as resolved
ENVIRONMENT = "environment.json"  # packages, machine, commit, ranks
START = "start.json"  # the start: its kind, statistics of the data, calibration, first evaluation
START_TENSORS = "start.safetensors"  # abduction and embedding at the start: the reference for KL
STATUS = "status.json"
LOCK = "lock"
CHANGES = "changes.jsonl"  # config changes since the run began
ARCHIVED = "archived-"  # folders of earlier runs (run.resume: restart)
METRICS = "metrics.jsonl"  # one line per optimizer step; step 0 is the start
ALARMS = "alarms.jsonl"
REPORT = "report.html"
EVALUATIONS = "evaluations"  # data for a report's plots
CHECKPOINTS = "checkpoints"
LATEST = "latest"  # path of the newest checkpoint, updated once it is complete
BEST, FIT = "best", "fit.json"  # next to a run: the path of the checkpoint that `cqwen fit` predicts with; its verdict
MANIFEST = "manifest.json"  # in a checkpoint or a feature cache
STATE = "state.json"  # in a checkpoint
FEATURE_CACHE = "feature_cache"
DIGESTS = "digests"  # cached digests of the base's files
STACKS = "stacks"  # stack traces of hung ranks
PROFILE = "profile"  # the trace of `train.profile`
WANDB_ID = "wandb_id"
TENSORBOARD = "tensorboard"
SLURM = "slurm"  # scripts, logs, history
HISTORY = "history.jsonl"  # in `slurm`: starts and ends

OPTIONAL = ("bitsandbytes",)
PACKAGES = ("cqwen-dist", "torch", "transformers", "peft", "deepspeed", "safetensors", *OPTIONAL)
# errno values for a disk that someone must fix first, and for an unreachable file system.
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM)
_AWAY = ("EIO", "ESTALE", "ETIMEDOUT", "ENOTCONN", "EHOSTDOWN", "EHOSTUNREACH", "EREMOTEIO")
AWAY = tuple(getattr(errno, name) for name in _AWAY if hasattr(errno, name))  # some platforms lack some of them


def words_of_disk(error: Exception, place: Path) -> tuple[str, str, bool]:
    """(path, message, whether the disk is unreachable) for an OSError, or a SafetensorError (which has no errno)."""
    message = getattr(error, "strerror", None) or str(error)
    return str(getattr(error, "filename", None) or place), message, getattr(error, "errno", None) in AWAY


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to. On success the file replaces `path` and survives a power loss.

    If the body raises, `path` stays unchanged and the temporary file is deleted.
    """
    # A random name: containers on multiple hosts can have equal process ids, and any rank may write a status.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield partial
        sync(partial)  # before the rename: otherwise a power loss could leave an empty file under the final name
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file. Readers see the complete old or new version, even after a power loss."""
    with written_whole(path) as partial, partial.open("x", encoding="utf-8") as file:
        file.write(text)


def not_followed(path: str, flags: int) -> int:
    """An `opener` for `open`: a link is refused, since a run folder may come from an untrusted source. Raises
    `UserError`."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _link(Path(path)) from None


def refuse_links(folder: Path) -> None:
    """Raises `UserError` if an entry of a run folder, or of a subfolder that runs write into, is a link.

    Writing through it would truncate or delete somebody else's file. Checkpoints and the feature cache may lie on
    another disk: in them only names of this package's own are written and deleted.
    """
    kept = (folder / SLURM / LATEST, folder / FEATURE_CACHE)  # the first is ours, to the newest logs
    for entry in [folder, *(folder / name for name in (STACKS, SLURM, EVALUATIONS, DIGESTS))]:
        for found in entry.iterdir() if entry.is_dir() else ():
            if found.is_symlink() and found not in kept:
                raise _link(found)


def _link(path: Path) -> UserError:
    return UserError("run.dir", Said(f"{path} is a link"), "a run folder with files of its own; remove the link")


def read_small(path: Path) -> str:
    """A file's text. Raises OSError, also for a folder or a pipe: reading a pipe would wait for a writer."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
    return path.read_text(encoding="utf-8")


def read_line(path: Path) -> str:
    """The text of a file of one line, such as `latest`; "" if it cannot be read or cannot be a name."""
    try:
        found = read_small(path).strip()
    except (OSError, ValueError):
        return ""
    return "" if "\0" in found or len(found.encode()) > 255 else found  # no file has a longer name


def read_object(path: Path) -> dict[str, Any]:
    """JSON object from a file; {} if the file is missing or contains no object."""
    try:
        found = from_json(read_small(path))  # unlike json, refuses deep nesting and lone surrogates by ValueError
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_number(value: object) -> bool:
    """Whether a value from a file can be a time or a count."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e11


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield objects from a JSON lines file. Skips lines cut off by a kill; a missing file is empty."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                found = from_json(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


def file_record(path: Path) -> dict[str, Any]:
    """A file's size in bytes and its SHA-256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def known_digest(path: Path, memo: Path) -> str:
    """A file's SHA-256, cached in folder `memo` until the file's size or modification time changes."""
    stat = path.stat()
    # The inode detects a replaced file with the same size and time.
    is_now = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
    entry = memo / hashlib.sha256(is_now.encode()).hexdigest()[:24]
    if len(known := read_line(entry)) == 64:
        return known
    found = str(file_record(path)["sha256"])
    if time.time_ns() - stat.st_mtime_ns > 2_000_000_000:  # recent writes may share one timestamp
        with suppress(OSError):
            memo.mkdir(parents=True, exist_ok=True)
            write_atomically(entry, found)
    return found


def key_digest(key: dict[str, Any]) -> str:
    """Folder name for a key: a digest of its plain values."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def let_read(path: Path) -> None:
    """Give files their folder's read permissions: safetensors creates files that only the owner can read."""
    files = path.rglob("*") if path.is_dir() else [path]
    for file in files:
        if file.is_file() and not file.is_symlink():
            file.chmod(file.parent.stat().st_mode & 0o666)


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
        for left in {*out.parent.glob(f".{glob.escape(out.name)}.{8 * '[0-9a-f]'}.partial")} - {partial}:
            other = os.open(left, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                with suppress(BlockingIOError):  # its process lives
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(other)
    try:
        yield partial
        if out.exists():
            out.rmdir()
        let_read(partial)
        partial.rename(out)
    finally:
        os.close(handle)
        shutil.rmtree(partial, ignore_errors=True)


@cache
def versions() -> dict[str, str]:
    """Installed versions of packages that affect results and files."""
    found = dict.fromkeys(PACKAGES, "not installed")
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def git_commit(folder: Path | None = None) -> str | None:
    """Commit of the folder's repository (default: the working directory), or None."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, cwd=folder)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def write_environment(folder: Path, world_size: int, details: dict[str, Any]) -> None:
    """Write environment.json. details: additional fields."""
    import torch  # the other modules here do not need it

    environment = {
        "python": sys.version.split()[0],
        "packages": versions(),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "ranks": world_size,
        "commit": git_commit(),
        "command": sys.argv,
        **details,
    }
    write_atomically(folder / ENVIRONMENT, json.dumps(environment, indent=1))
