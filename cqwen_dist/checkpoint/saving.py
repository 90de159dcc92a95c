"""Writes checkpoints: atomic, verified, in the background.

A save first copies everything that trains to host memory; training waits only for this copy. Then a thread on each rank
writes it to a temporary folder, fsyncs it, reads a sample back, and agrees with the other ranks over a separate process
group. Rank 0 writes the manifest, renames the folder, moves `latest`, and deletes outdated checkpoints. One save runs
at a time. After a SIGKILL at any moment, either the previous checkpoint or this one is complete.

(torch's asynchronous checkpointing is not used: its metadata file is a pickle, and its shards depend on ranks.)
"""

import json
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cqwen_dist.checkpoint import adapter
from cqwen_dist.checkpoint.manifest import FORMAT, Retention, checkpoint_folder, evaluated, leftovers, put_aside
from cqwen_dist.checkpoint.mirror import Mirror
from cqwen_dist.checkpoint.resume import ROWS, Tensors, TrainState
from cqwen_dist.config.errors import DiskError, Said
from cqwen_dist.config.trainable import is_lora
from cqwen_dist.parallel.collectives import gather_objects
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.run.files import (
    LATEST,
    MANIFEST,
    STATE,
    file_record,
    git_commit,
    let_read,
    sync,
    versions,
    words_of_disk,
    write_atomically,
)

SAMPLES = 8  # tensors per file that are read back and compared


@dataclass
class About:
    """Manifest entries other than files. metrics: from an evaluation at this step, or empty."""

    step: int
    stage: str
    metrics: dict[str, float] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    base: str | None = None  # base model name for adapter_config.json


class Saver:
    """Saves a run's checkpoints. Every method is collective over the world."""

    def __init__(
        self,
        run_dir: Path,
        groups: Groups,
        retention: Retention,
        *,
        on_failure: Callable[[str], None] = lambda reason: None,
        say: Callable[[str], None] = lambda note: None,
        mirror: Mirror | None = None,
    ) -> None:
        """on_failure: called as soon as a background save fails; `wait` raises the error. say: receives notes about
        problems that are not failures."""
        self._run_dir, self._groups, self._retention = run_dir, groups, retention
        self._on_failure, self._say = on_failure, say
        self._mirror = mirror  # of rank 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.whole: list[str] = []  # names of complete checkpoints, in order
        self._seconds: dict[str, float] = {}

    def save(self, collect: Callable[[], TrainState], about: About) -> None:
        """Copy the state returned by `collect`, then write it in the background.

        Raises the previous save's error: `UserError` for a full or read-only disk.
        """
        began = time.monotonic()
        # Two saves at a time would need twice the host memory, and their collectives could mix
        self.wait()
        state = self._copied(collect())
        self._thread = threading.Thread(target=self._write, args=(state, about, began), name="save", daemon=True)
        self._thread.start()
        self._seconds["perf/save_stall_s"] = time.monotonic() - began

    @property
    def newest(self) -> str | None:
        """The last complete checkpoint."""
        return self.whole[-1] if self.whole else None

    def take(self) -> dict[str, float]:
        """Seconds since the last call: how long training waited for saves, and how long they took."""
        taken, self._seconds = self._seconds, {}
        return taken

    def mirror_news(self) -> list[tuple[str, str | None]]:
        """Since the last call: each checkpoint that was uploaded, or could not be, with the reason."""
        news: deque[tuple[str, str | None]] = deque() if self._mirror is None else self._mirror.news
        return [news.popleft() for _ in range(len(news))]

    def wait(self) -> None:
        """Wait for a save in progress. Raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self) -> None:
        """`wait`, then wait for the mirror, at the end of a command."""
        self.wait()
        if self._mirror is not None:
            self._mirror.wait()

    def close(self, seconds: float = 60.0) -> None:
        """After the run has failed: let a save in progress finish, and its copy. Raises nothing."""
        if self._thread is not None:
            self._thread.join(seconds)
        if self._mirror is not None:
            self._mirror.wait(seconds)

    @torch.no_grad()
    def _copied(self, state: TrainState) -> TrainState:
        """Copy this rank's tensors to host memory (pinned if they come from a GPU)."""
        parts: dict[str, Any] = {"state": json.loads(json.dumps(state.state, default=float))}
        for part in ("features", "feature_moments", "heads", "head_moments", "rows", "row_moments"):
            # No tensor is written twice: rank 0 writes the replicated parts, replica 0 the rows, owners the moments.
            mine = self._groups.rank == 0
            if part == "row_moments":
                mine = state.moment_range[1] > state.moment_range[0]
            elif part == "rows":
                mine = self._groups.replica_rank == 0
            tensors: Tensors = getattr(state, part) if mine else {}
            parts[part] = {name: _host_copy(tensor.detach()) for name, tensor in tensors.items()}
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the copies are asynchronous, and training changes the tensors next
        return replace(state, **parts)

    def _write(self, state: TrainState, about: About, began: float) -> None:
        final, groups = checkpoint_folder(self._run_dir, about.step), self._groups
        partial = final.with_name(f".{final.name}.partial")

        def prepare() -> None:
            for left in leftovers(final.parent):
                shutil.rmtree(left, ignore_errors=True)
            (partial / adapter.FOLDER).mkdir(parents=True)

        try:
            # Three collective steps. If one rank fails, each raises on all ranks, so no rank continues by itself.
            _agreed(prepare, partial, groups, main_only=True)
            records = _agreed(lambda: _write_files(partial, state, about, groups), partial, groups)
            _agreed(lambda: _commit(self._run_dir, partial, final, records, about), partial, groups, main_only=True)
            self.whole.append(final.name)
            if groups.rank == 0:
                self._prune(about.step)
                if self._mirror is not None:
                    self._mirror.push(self.whole[-1])
            self._seconds["perf/save_s"] = time.monotonic() - began
        except BaseException as error:  # `wait` raises it
            self._error = error
            self._on_failure(f"the checkpoint of step {about.step} failed")

    def _prune(self, newest_step: int) -> None:
        """Delete outdated checkpoints. A failure is only noted, because the new checkpoint is complete."""
        try:
            for step in self._retention.outdated(evaluated(self._run_dir), newest_step):
                folder = checkpoint_folder(self._run_dir, step)
                copied = self._mirror is not None and self._mirror.busy == folder.name  # over a slow link
                if not copied and not folder.is_symlink():  # a user moved it to a different disk to keep it
                    shutil.rmtree(put_aside(folder))
        except OSError as error:
            reason = f"{error.filename or self._run_dir}: {error.strerror or error}"
            self._say(f"note: an outdated checkpoint could not be deleted: {reason}")


def _agreed(action: Callable[[], Any], partial: Path, groups: Groups, main_only: bool = False) -> dict[str, Any]:
    """Run an action on every rank, or only on rank 0. Collective: gathers results and errors.

    Returns the merged results. Raises the first failure on all ranks, so that no rank waits for a failed one.
    """
    result, failure, words = None, None, None  # words: (path of a disk error or "", message, disk unreachable?)
    try:
        if groups.rank == 0 or not main_only:
            result = action()
    except Exception as error:
        failure, words = error, ("", f"{type(error).__name__}: {error}", False)
        if isinstance(error, (OSError, SafetensorError)):
            words = words_of_disk(error, partial)
    # Reached even after an error: the other ranks wait in this collective.
    everyone = gather_objects([words, result or {}], groups.saving)
    failures = [(rank, words) for rank, (words, _) in enumerate(everyone) if words is not None]
    if failures:
        if groups.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # make room on a full disk
        rank, (place, text, away) = failures[0]
        if place:
            allowed = "a disk with free space; rerun the same command to resume from the previous checkpoint"
            raise DiskError("run.dir", Said(text), allowed, place, away)
        if failure is not None:
            raise failure
        raise RuntimeError(f"rank {rank} could not save: {text}")
    return {name: record for _, part in everyone for name, record in part.items()}


def _write_files(partial: Path, state: TrainState, about: About, groups: Groups) -> dict[str, Any]:
    """Write and check this rank's files; returns their records."""
    files: dict[str, Tensors] = {}
    # Replicas have equal rows; one of them writes
    if groups.replica_rank == 0 and state.row_range[1] > state.row_range[0]:
        files[_rows_file(state.row_range)] = state.rows
    if state.moment_range[1] > state.moment_range[0]:
        files[_rows_file(state.moment_range, ".moments")] = state.row_moments
    records = {}
    if groups.rank == 0:
        files["features.safetensors"] = {k: v for k, v in state.features.items() if not is_lora(k)}
        files["features.moments.safetensors"] = state.feature_moments
        files["heads.safetensors"] = state.heads
        files["heads.moments.safetensors"] = state.head_moments
        folder = partial / adapter.FOLDER
        if adapters := adapter.to_peft(state.features):
            files[f"{adapter.FOLDER}/{adapter.WEIGHTS}"] = adapters
            adapter.write_config(folder, state.state["model"]["lora"], about.base)
            sync(folder / adapter.CONFIG)
            records[f"{adapter.FOLDER}/{adapter.CONFIG}"] = file_record(folder / adapter.CONFIG)
        else:
            folder.rmdir()
        write_atomically(partial / STATE, json.dumps(state.state, indent=1))
        records[STATE] = file_record(partial / STATE)
    for name, tensors in files.items():
        records[name] = _write(partial / name, tensors)
    return records


def _rows_file(rows: tuple[int, int], kind: str = "") -> str:
    return f"rows-{rows[0]:08d}-{rows[1]:08d}{kind}.safetensors"


def _write(path: Path, tensors: Tensors) -> dict[str, Any]:
    """Save, fsync and read back. Rejects empty tensors: ZeRO-3 leaves empty placeholders that would lose weights."""
    ready = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if empty := [name for name, tensor in ready.items() if tensor.numel() == 0]:
        raise RuntimeError(f"{path.name}: {empty[0]} is empty; nothing was saved")
    save_file(ready, path)
    let_read(path)
    sync(path)
    record = file_record(path)

    # Read back all shapes and the first values of a sample, through a fresh handle: a full or broken disk may have
    # taken the write without an error
    names = list(ready)
    with safe_open(path, framework="pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (a handle)
        if found != {name: tuple(tensor.shape) for name, tensor in ready.items()}:
            raise RuntimeError(f"{path.name}: the names or shapes read back differ")
        for name in names[:: max(1, len(names) // SAMPLES)]:
            tensor = ready[name]
            there = file.get_slice(name)[:1] if tensor.ndim else file.get_tensor(name)
            here = tensor[:1] if tensor.ndim else tensor
            # Compare bytes, because NaN never equals NaN.
            if not torch.equal(there.reshape(-1).view(torch.uint8), here.reshape(-1).view(torch.uint8)):
                raise RuntimeError(f"{path.name}: {name} was read back with other numbers")
    return record


def _commit(run_dir: Path, partial: Path, final: Path, records: dict[str, Any], about: About) -> None:
    """Write the manifest, then rename the folder, then move `latest`."""
    manifest = {
        "format": FORMAT,
        "step": about.step,
        "stage": about.stage,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "files": records,
        "rows": [[int(match[1]), int(match[2])] for name in sorted(records) if (match := ROWS.fullmatch(name))],
        "figures": about.metrics,
        "config": about.config,
        "versions": versions(),
        "commit": git_commit(),
    }
    # File names must be durable before the manifest declares the folder complete.
    for folder in (path for path in (partial / adapter.FOLDER, partial) if path.is_dir()):
        sync(folder)
    write_atomically(partial / MANIFEST, json.dumps(manifest, indent=1))
    # A run that was set back may save a step again. After a kill between the two renames, `finish_renames` repairs it.
    replaced = put_aside(final) if final.exists() else None
    partial.rename(final)
    sync(final.parent)
    write_atomically(run_dir / LATEST, str(final.relative_to(run_dir)) + "\n")
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)  # if this fails, the next save deletes it


def _host_copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)  # torch caches pinned blocks
    return host.copy_(tensor, non_blocking=True)
