"""Opening a run's folder: a new one, or one to resume, whose config must be the same."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from cqwen_dist.config import Config, UserError, changed_keys, load_config
from cqwen_dist.run.files import ARCHIVED, CHANGES, CONFIG, LATEST, LOCK, SLURM, START, write_atomically
from cqwen_dist.run.growth import Change, refuse_past_changes
from cqwen_dist.run.status import read_status

BUILDS_BASE = ("model.", "data.", "train.seed")  # keys that decide what the base of model.architecture becomes


def open_run(
    config: Config,
    before_writing: Callable[[], object] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Make the run's folder, or check that it is this run's: a config that differs only where it may (`run.growth`).

    Until training starts, config keys may change freely; a base that was built from a changed key is deleted, to be
    built anew. before_writing: called when the folder exists and nothing in it has been changed yet. say: takes notes.
    Raises `UserError` by key where the folder is another run's, or cannot be written.
    """
    folder = Path(config.run.dir)
    refuse_changes(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before_writing()
        if _starts_over(config):
            _archive(folder, say)
        begun = has_begun(folder)
        changes = _changes(config, begun)
        if (
            not begun
            and config.model.architecture is not None
            and any(key.startswith(BUILDS_BASE) for key, *_ in changes)
        ):
            shutil.rmtree(config.base_folder, ignore_errors=True)
        if begun and changes:
            _note_changes(folder, changes, say)
        write_atomically(folder / CONFIG, config.to_yaml())
    except OSError as error:
        raise UserError("run.dir", str(folder), f"a folder that can be written ({error.strerror})") from None
    return folder


def refuse_changes(config: Config) -> None:
    """Raises `UserError` by key where the run in the folder has begun with another config; writes nothing."""
    folder = Path(config.run.dir)
    if not _starts_over(config) and has_begun(folder) and (changes := _changes(config)):
        refuse_past_changes(load_config(folder / CONFIG), changes, folder, str(folder / CONFIG))


def is_done(config: Config) -> bool:
    """Whether the run's status is done, it has a checkpoint, and the config asks for nothing more."""
    folder = Path(config.run.dir)
    done = read_status(folder)["status"] == "done" and (folder / LATEST).is_file()
    return done and not _starts_over(config) and not _changes(config)


def has_begun(folder: Path) -> bool:
    """Whether a run has begun to train in the folder: then it binds what comes."""
    return any((folder / name).is_file() for name in (START, LATEST))


def _starts_over(config: Config) -> bool:
    """Whether this command is to begin anew; a job that SLURM queued again is not."""
    return config.run.resume == "restart" and os.environ.get("SLURM_RESTART_COUNT", "0") == "0"


def _changes(config: Config, begun: bool = True) -> list[Change]:
    """(key, before, now) of what differs from the config in the run's folder; empty where it has none."""
    known = Path(config.run.dir) / CONFIG
    return changed_keys(load_config(known), config, begun) if known.is_file() else []


def _note_changes(folder: Path, changes: list[Change], say: Callable[[str], None]) -> None:
    entry = {"time": round(time.time(), 3), "changes": [list(change) for change in changes]}
    with (folder / CHANGES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
    for key, before, now in changes:
        say(f"changed: {key}: {before!r} -> {now!r}")


def _archive(folder: Path, say: Callable[[str], None]) -> None:
    """Move what is in the folder into one of its own; a running job's logs and the lock stay."""
    kept = (LOCK, SLURM)
    found = [path for path in folder.iterdir() if path.name not in kept and not path.name.startswith(ARCHIVED)]
    if found:
        archive = folder / f"{ARCHIVED}{time.strftime('%Y%m%d-%H%M%S')}"
        archive.mkdir()
        for path in found:
            path.rename(archive / path.name)
        say(f"starts over; what was there is in {archive}")
