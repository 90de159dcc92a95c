"""Opens a run folder, a new one or one to resume, and locks it for one command (no torch).

On resume only some config keys may differ. Keys of finished stages are fixed. A stage has begun when the newest
checkpoint contains one of its steps. The current stage may change its length and its rates. Later stages may change
every key, and stages may be appended. Keys that only affect how to compute may always change
(`config.reading.RESUMABLE`).

Rank 0 holds the lock while it lives. The kernel releases a lock (`flock`) when its process ends in any way. So a killed
run needs no clean-up, and reused process ids do no harm. But on some shared file systems such locks work only within
one machine, or not at all. So the file also names its holder's machine, and the holder touches the file every few
seconds. If the kernel cannot know, a file that is still touched means a running process; otherwise that machine has
died.
"""

import errno
import fcntl
import json
import os
import platform
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cqwen_dist.config import Config, Said, UserError, changed_keys, load_config, writing
from cqwen_dist.run import files
from cqwen_dist.run.files import not_followed, read_line, read_object, refuse_links, write_atomically
from cqwen_dist.run.status import read_status

BUILDS_BASE = ("model.", "data.", "train.seed")  # keys that affect the base built from model.architecture
LENGTH = ("steps", "epochs", "until")  # keys that set a stage's length
RATES = ("lr", "lr_groups")  # keys that a later step reads anew
BEAT_S = 5.0  # seconds between touches of the lock
PATIENCE_BEATS = 4  # missed heartbeats after which a host counts as dead
Change = tuple[str, object, object]  # key, before, now


def open_run(
    config: Config, before_writing: Callable[[], object] = lambda: None, say: Callable[[str], None] = lambda text: None
) -> Path:
    """Create the run folder, or check that it belongs to this run, and write the config into it.

    Before training starts, every config key may change. If a base was built from a changed key, it is deleted and
    rebuilt. before_writing: called when the folder exists and is still unchanged. say: receives notes. Raises
    `UserError` by key if the folder belongs to a different run or is not writable.
    """
    folder = Path(config.run.dir)
    refuse_changes(config)
    with writing("run.dir", folder, "a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder)
        # The lock first: until then a second command may be writing here
        before_writing()
        if starts_over(config):
            archive(folder, say)
        begun = has_begun(folder)
        changes = _changes(config, folder, begun)
        if begun and changes:
            entry = {"time": round(time.time(), 3), "changes": [list(change) for change in changes]}
            with open(folder / files.CHANGES, "a", encoding="utf-8", opener=not_followed) as file:
                file.write(json.dumps(entry) + "\n")
            for key, before, now in changes:
                say(f"changed: {key}: {before!r} -> {now!r}")
        # Training has not begun, so a base built from changed keys can simply be rebuilt.
        elif config.model.architecture is not None and any(key.startswith(BUILDS_BASE) for key, *_ in changes):
            shutil.rmtree(config.base_folder, ignore_errors=True)
        write_atomically(folder / files.CONFIG, config.to_yaml())
    return folder


def refuse_changes(config: Config, fetched: Path | None = None) -> None:
    """Raises `UserError` by key if the run in the folder, or of the files in `fetched`, began with a different
    config."""
    folder = fetched or Path(config.run.dir)
    if not starts_over(config) and (fetched or has_begun(folder)) and (changes := _changes(config, folder)):
        _refuse_past_changes(load_config(folder / files.CONFIG), changes, folder)


def is_done(config: Config) -> bool:
    """Whether the run's status is done, it has a checkpoint, and the config asks for no more steps."""
    folder = Path(config.run.dir)
    done = read_status(folder)["status"] == "done" and (folder / files.LATEST).is_file()
    return done and not starts_over(config) and not _changes(config, folder)


def has_begun(folder: Path) -> bool:
    """Whether training has begun in the folder. From then on the config is fixed."""
    return any((folder / name).is_file() for name in (files.START, files.LATEST))


def starts_over(config: Config) -> bool:
    """Whether this command restarts the run. A job requeued by SLURM, or ranks that torchrun starts again, do not."""
    counts = (os.environ.get(f"{launcher}_RESTART_COUNT", "0") for launcher in ("SLURM", "TORCHELASTIC"))
    return config.run.resume == "restart" and {*counts} == {"0"}


def _changes(config: Config, folder: Path, begun: bool = True) -> list[Change]:
    known = folder / files.CONFIG
    return changed_keys(load_config(known), config, begun) if known.is_file() else []


def _refuse_past_changes(old: Config, changes: list[Change], folder: Path) -> None:
    where = str(folder / files.CONFIG)
    step, stops = _progress(folder)
    current = next((i for i, stop in enumerate(stops) if step <= stop), len(stops) - 1) if step else -1
    for key, before, now in changes:
        # Outside the stages every listed key is fixed; within them it depends on the stage's progress.
        words = key.split(".")
        if words[0] != "stages":
            allowed = f"{before!r}, with which the run in {folder} began (or another run.dir; model.warm_start={folder}"
            raise UserError(key, now, f"{allowed} takes its weights along)", where)
        index = int(words[1])
        if index > current:
            continue
        name = old.stages[index].name
        if index < current or words[2] not in LENGTH + RATES:
            state = f"has begun: only its {', '.join(LENGTH + RATES)} may change"
            allowed = f"{before!r}, as stage {name} {'is over' if index < current else state} (later stages are free, "
            raise UserError(key, now, f"{allowed}and another run.dir with model.warm_start={folder})", where)
        # The current stage may become shorter, but not shorter than the steps it has already taken.
        taken = step - (stops[index - 1] if index else 0)
        if words[2] == "steps" and isinstance(now, int) and now < taken:
            raise UserError(key, now, f"{taken} or more, which stage {name} has taken", where)


def _progress(folder: Path) -> tuple[int, list[int]]:
    """(newest checkpoint's step, each stage's last step as saved there); (0, []) without a checkpoint."""
    try:
        newest = folder / read_line(folder / files.LATEST)  # without `latest`: the folder itself
        state = read_object(newest / files.STATE)
        return int(state["step"]), [int(stop) for stop in state["schedule"]["stops"]]
    except (OSError, ValueError, KeyError, TypeError):
        return 0, []


def archive(folder: Path, say: Callable[[str], None]) -> None:
    """Move the folder's content into a subfolder, except the lock and a running job's logs."""
    kept = (files.LOCK, files.SLURM)
    found = [path for path in folder.iterdir() if path.name not in kept and not path.name.startswith(files.ARCHIVED)]
    if found:
        archive = folder / f"{files.ARCHIVED}{time.strftime('%Y%m%d-%H%M%S')}"
        while archive.exists():  # a clock that was set back shows the same second again
            archive = archive.with_name(f"{archive.name}-again")
        archive.mkdir()
        for path in found:
            path.rename(archive / path.name)
        say(f"starts again; the earlier run is in {archive}")


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises `UserError` naming the holder if a different process has it."""
    path = run_dir / files.LOCK
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
