"""Opening a run's folder: a new one, or one to resume, whose config must be the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from cqwen_dist.config import Config, UserError, changed_keys, load_config
from cqwen_dist.run.files import CONFIG, LATEST, START, write_atomically
from cqwen_dist.run.status import read_status

BUILDS_BASE = ("model.", "data.", "train.seed")  # keys that decide what the base of model.architecture becomes


def open_run(config: Config, before_writing: Callable[[], object] = lambda: None) -> Path:
    """Make the run's folder, or check that it is this run's: same config but for the keys that may change.

    Until training starts, config keys may change freely; a base that was built from a changed key is deleted, to be
    built anew. before_writing: called when the folder exists and nothing in it has been changed yet. Raises `UserError`
    by key where the folder is another run's, or cannot be written.
    """
    folder = Path(config.run.dir)
    refuse_changes(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before_writing()
        changed = [] if _begun(folder) else [key for key, _, _ in _changes(config, begun=False)]
        if config.model.architecture is not None and any(key.startswith(BUILDS_BASE) for key in changed):
            shutil.rmtree(config.base_folder, ignore_errors=True)
        write_atomically(folder / CONFIG, config.to_yaml())
    except OSError as error:
        raise UserError("run.dir", str(folder), f"a folder that can be written ({error.strerror})") from None
    return folder


def refuse_changes(config: Config) -> None:
    """Raises `UserError` by key where the run in the folder began with another config; writes nothing."""
    folder = Path(config.run.dir)
    if not _begun(folder):
        return
    for key, old, new in _changes(config):
        allowed = f"{old!r}, with which the run in {folder} began (or another run.dir)"
        raise UserError(key, new, allowed, str(folder / CONFIG))


def _begun(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (START, LATEST))


def _changes(config: Config, begun: bool = True) -> list[tuple[str, object, object]]:
    """(key, before, now) of what differs from the config in the run's folder; empty where it has none."""
    known = Path(config.run.dir) / CONFIG
    return changed_keys(load_config(known), config, begun) if known.is_file() else []


def is_done(folder: Path) -> bool:
    """Whether a run's status is done and it has a checkpoint."""
    return read_status(folder)["status"] == "done" and (folder / LATEST).is_file()
