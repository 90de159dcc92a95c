"""A copy of a run in an object store (`run.mirror`), for machines whose disk does not outlive them.

    URL/checkpoints/step-00000200/...   a checkpoint; its manifest is written last and deleted first
    URL/config.yaml, start.json, ...    other files that a resume reads, as of the newest checkpoint

Rank 0 uploads each complete checkpoint in the background. A checkpoint in the store counts only if its manifest is
there and every file has the digest in it, so a kill between any two writes loses at most the newest one. Any store of
`fsspec` will do (s3://, gs://, az://, file://); credentials come from the environment.
"""

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cqwen_dist.checkpoint.manifest import list_checkpoints, read_manifest, verify
from cqwen_dist.config.errors import Said, UserError, reason_of
from cqwen_dist.run import files
from cqwen_dist.run.files import sync, write_atomically

KEY = "run.mirror"
# Files that a resume reads or continues
BESIDE = (files.CONFIG, files.START, files.START_TENSORS, files.CHANGES, files.METRICS, files.ALARMS, files.WANDB_ID)
FOLDERS = ("base", "data")  # built or written once, before the first step


class Mirror:
    """The store of one run. Raises `UserError` for a URL that no installed package serves."""

    def __init__(self, url: str, run_dir: Path, say: Callable[[str], None] = lambda text: None) -> None:
        import fsspec  # with the packages of the stores

        try:
            self._store, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(KEY, url, f"a URL that fsspec can open ({reason_of(error)})") from None
        self._store.auto_mkdir = True  # of a local folder; object stores have none
        self._root, self._run_dir, self._say = root.rstrip("/"), run_dir, say
        self._news = threading.Condition()
        self.busy: str | None = None  # name of the checkpoint that is being uploaded: it must not be deleted
        self._due: str | None = None  # of the newest that is not uploaded yet
        self._thread: threading.Thread | None = None
        self.news: deque[tuple[str, str | None]] = deque()  # (checkpoint, why it is not mirrored), for who takes it

    def push(self, name: str) -> None:
        """Upload a complete checkpoint in the background. One that is not begun yet gives way to a newer one."""
        with self._news:
            self._due = name
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the uploads in progress. Raises nothing: failures are in `news`."""
        if (thread := self._thread) is not None:
            thread.join(seconds)

    def _work(self) -> None:
        while True:
            with self._news:
                name = self.busy = self._due
                self._due = None
                if name is None:
                    self._thread = None
                    return
            try:
                self._delete_halves()  # of an upload that was killed
                self._upload(name)
                self.news.append((name, None))
            except Exception as error:  # each store raises errors of its own
                if (self._run_dir / files.CHECKPOINTS / name).is_dir():  # else a newer one has replaced it meanwhile
                    self.news.append((name, f"{KEY}: {name} is not mirrored: {reason_of(error)}"))
                with suppress(Exception):  # on a full disk, the next one may need its room
                    self._delete_halves()

    def _upload(self, name: str) -> None:
        folder, there = self._run_dir / files.CHECKPOINTS / name, self._at(files.CHECKPOINTS, name)
        manifest = read_manifest(folder)
        if manifest is None:
            raise FileNotFoundError(f"no {files.MANIFEST}")
        for each in FOLDERS:
            for file in sorted((self._run_dir / each).rglob("*")):
                inside = str(file.relative_to(self._run_dir))
                if file.is_file() and not self._has(self._at(inside), file.stat().st_size):
                    self._store.put_file(str(file), self._at(inside))
        for each in BESIDE:
            if (self._run_dir / each).is_file():
                self._store.put_file(str(self._run_dir / each), self._at(each))
        # A run that was set back saves a step again: without its manifest the old copy no longer counts
        self._delete(f"{there}/{files.MANIFEST}")
        for file in manifest["files"]:
            self._store.put_file(str(folder / file), f"{there}/{file}")
        for file, record in manifest["files"].items():
            if not self._has(f"{there}/{file}", record["size"]):
                raise OSError(f"{file} has another size in the store")
        self._store.put_file(str(folder / files.MANIFEST), f"{there}/{files.MANIFEST}")
        # Last, delete checkpoints that the run no longer keeps
        kept = {known.name for known in list_checkpoints(self._run_dir)} | {name}
        for old in self._names():
            if old not in kept:
                self._delete(self._at(files.CHECKPOINTS, old, files.MANIFEST))
                self._store.rm(self._at(files.CHECKPOINTS, old), recursive=True)

    def _delete_halves(self) -> None:
        """Delete checkpoints without a manifest."""
        whole = self._names()
        for there in map(str, self._store.glob(self._at(files.CHECKPOINTS, "step-*"))):
            if there.split("/")[-1] not in whole:
                self._store.rm(there, recursive=True)

    def _has(self, there: str, size: int) -> bool:
        self._store.invalidate_cache()
        return bool(self._store.exists(there)) and self._store.info(there)["size"] == size

    def _delete(self, there: str) -> None:
        if self._store.exists(there):
            self._store.rm_file(there)

    def fetch(self, refuse: Callable[[Path], None] = lambda folder: None) -> str | None:
        """Bring the newest whole checkpoint, and the other files that a resume reads, into a run folder without
        checkpoints.

        refuse: raises `UserError` if the run with these config.yaml and state.json is not to be continued. Returns the
        checkpoint's name; None if the folder has one, or the store has none. Checkpoints that are damaged in the store
        are passed over with a note. Raises `UserError` if the store does not answer, or has a different run.
        """
        own, there = self._run_dir / files.START, self._at(files.START)
        try:  # an upload would delete a different run's checkpoints
            another = bool(self._names()) and self._store.cat_file(there) != own.read_bytes()
        except Exception:  # as above; the folder's run has not begun, or the store does not answer, as uploads will say
            another = False
        if another:
            raise UserError(KEY, Said("the checkpoints of another run"), "a store for each run", self._root)
        if list_checkpoints(self._run_dir):
            return None
        with self._answering():
            return next(self._whole(refuse), None)

    def archive(self) -> None:
        """Move what the store has of this run into a subfolder, for a run that starts over. Raises `UserError`."""
        to = self._at(f"{files.ARCHIVED}{time.strftime('%Y%m%d-%H%M%S')}")
        with self._answering():
            self._store.invalidate_cache()
            places = (files.CHECKPOINTS, *FOLDERS, *BESIDE)
            found = [str(file) for each in places for file in self._store.find(self._at(each))]
            for file in sorted(found, key=lambda file: not file.endswith(files.MANIFEST)):  # from now on none counts
                self._store.mv(file, f"{to}{file[len(self._root) :]}")

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:  # of `refuse`
            found = Said(f"the checkpoints of a run with another {error.key}")
            raise UserError(KEY, found, f"a store for each run, or that run's {error.key}", self._root) from None
        except Exception as error:  # as above
            raise UserError(KEY, Said(reason_of(error)), "a store that answers, or no mirror", self._root) from None

    def _whole(self, refuse: Callable[[Path], None]) -> Iterator[str]:
        for name in sorted(self._names(), reverse=True):
            partial = self._run_dir / files.CHECKPOINTS / f".{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            with TemporaryDirectory() as small:  # a different run is refused at once
                for there in (self._at(files.CONFIG), self._at(files.CHECKPOINTS, name, files.STATE)):
                    self._get(there, Path(small, Path(there).name))
                refuse(Path(small))
            self._get(self._at(files.CHECKPOINTS, name, files.MANIFEST), partial / files.MANIFEST)
            for file in (read_manifest(partial) or {"files": {}})["files"]:
                self._get(self._at(files.CHECKPOINTS, name, file), partial / file)
            if problems := verify(partial):
                self._say(f"note: {KEY}: {name} is damaged in the store ({problems[0]})")
                shutil.rmtree(partial)
                continue
            # Before the checkpoint gets its name: after a kill here, the folder counts as empty and is fetched again
            for each in BESIDE:
                self._get(self._at(each), self._run_dir / each)
            for each in FOLDERS:
                root = self._at(each)
                for found in self._store.find(root) if self._store.exists(root) else ():
                    self._get(found, self._run_dir / each / str(found)[len(root) :].lstrip("/"))
            partial.rename(partial.with_name(name))
            sync(partial.parent)
            write_atomically(self._run_dir / files.LATEST, f"{files.CHECKPOINTS}/{name}\n")
            yield name

    def _get(self, there: str, file: Path) -> None:
        if self._store.exists(there):
            file.parent.mkdir(parents=True, exist_ok=True)
            self._store.get_file(there, str(file))

    def _names(self) -> list[str]:
        self._store.invalidate_cache()
        found: list[Any] = self._store.glob(self._at(files.CHECKPOINTS, "step-*", files.MANIFEST))
        return [str(path).split("/")[-2] for path in found]

    def _at(self, *parts: str) -> str:
        return "/".join((self._root, *parts))
