"""z of every label position of a data set on disk: written once by all ranks, read by any rank by sample number.

    KEY/                          the folder's name is a digest of all that z depends on
      z-00000000-00000250.arrow   z of samples [0, 250): a row a sample, [tokens,H] in the run's dtype as bytes
      manifest.json               the key spelled out, every file with size and SHA-256; written last

The order of samples is global and the same on any number of ranks. The rank that reads a sample need not have written
it, so files are memory-mapped and read by sample. A folder without a manifest is not a cache.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.parallel.collectives import barrier, gather_objects
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.run.files import MANIFEST, file_record, key_digest, sync, write_atomically

SCHEMA = pa.schema([("z", pa.large_binary())])
ROOM = 1.02  # of a cache's size that the disk must have free


class CacheRefused(Exception):
    """Why there is no cache: one sentence, the same on every rank."""


def is_cache(folder: Path) -> bool:
    """Whether a folder is a cache, whole or partial: it is named after its key's digest."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    if re.fullmatch(r"\.[0-9a-f]{24}\.[0-9]+\.partial", folder.name):
        return True
    try:
        return key_digest(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["key"]) == folder.name
    except (OSError, ValueError, KeyError, TypeError):
        return False


class FeatureShards:
    """A whole cache, memory-mapped."""

    def __init__(self, folder: Path, hidden: int, dtype: torch.dtype) -> None:
        self.folder, self.hidden, self.dtype = folder, hidden, dtype
        self._starts: list[int] = []  # the first sample of each file
        self._columns: list[pa.ChunkedArray] = []
        for path in sorted(folder.glob("z-*.arrow")):
            self._starts.append(int(path.name.split("-")[1]))
            self._columns.append(pa.ipc.open_file(pa.memory_map(str(path))).read_all()["z"])

    def read(self, samples: list[int]) -> Tensor:
        """z [N,H] of these samples' label positions, in order, on the CPU in the run's dtype."""
        parts = [np.empty(0, np.uint8)]
        for sample in samples:
            file = bisect_right(self._starts, sample) - 1
            row = self._columns[file][sample - self._starts[file]]
            parts.append(np.frombuffer(row.as_buffer(), np.uint8))
        rows = np.concatenate(parts).reshape(-1, self.hidden * self.dtype.itemsize)
        return torch.from_numpy(rows).view(self.dtype)


def open_shards(
    folder: Path, key: dict[str, Any], hidden: int, dtype: torch.dtype, runtime: Runtime
) -> FeatureShards | None:
    """The cache of this key, or None where any rank finds it missing or damaged.

    Collective over the world: each file's checksum is verified by one rank.
    """
    rank, world = runtime.rank, runtime.world_size
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = sorted(manifest["files"].items())
        good = manifest["key"] == key and all((folder / name).stat().st_size == r["size"] for name, r in files)
        good = good and all(file_record(folder / name) == record for name, record in files[rank::world])
    except (OSError, ValueError, KeyError, TypeError):
        good = False
    return FeatureShards(folder, hidden, dtype) if all(gather_objects(good)) else None


def build_shards(
    folder: Path,
    key: dict[str, Any],
    batches: Iterator[Batch],
    samples: range,
    features: Callable[[Batch, Tensor], Tensor],
    runtime: Runtime,
    tell: Callable[[int], None],
) -> None:
    """Write the cache of a key. Collective over the world; it appears whole or not at all.

    batches: this rank's `samples`, in order, as many batches on every rank (of padding where need be). features: z of
    a batch's label positions. tell: called with the samples done so far. Raises `CacheRefused` on every rank alike
    where a disk fails or z is not finite, and what `features` raises.
    """
    who = gather_objects(os.getpid())[0]  # another run may be making the same
    beside = folder.with_name(f".{folder.name}.{who}.partial")
    try:
        files = _write_shards(beside, batches, samples, features, runtime, tell)
        if runtime.is_main:
            write_atomically(beside / MANIFEST, json.dumps({"key": key, "files": files}, indent=1))
            shutil.rmtree(folder, ignore_errors=True)
            beside.rename(folder)
            sync(folder.parent)
        barrier()
    finally:
        if runtime.is_main:
            shutil.rmtree(beside, ignore_errors=True)


def _write_shards(
    beside: Path,
    batches: Iterator[Batch],
    samples: range,
    features: Callable[[Batch, Tensor], Tensor],
    runtime: Runtime,
    tell: Callable[[int], None],
) -> dict[str, Any]:
    """Every rank writes its own file; returns size and checksum of all ranks' by name."""
    trouble = ""
    if runtime.is_main:
        try:
            beside.mkdir(parents=True)
        except OSError as error:
            trouble = str(error)
    _refuse_together(trouble)
    path = beside / f"z-{samples.start:08d}-{samples.stop:08d}.arrow"
    try:
        writer = pa.ipc.new_file(str(path), SCHEMA)
    except OSError as error:
        writer, trouble = None, f"rank {runtime.rank} does not see {beside}: {error}"
    _refuse_together(trouble)
    assert writer is not None
    done = 0
    with torch.no_grad():
        for batch in batches:
            mask = batch.learnt_mask
            keep = batch.learnt.to(runtime.device)
            z = features(batch.to(runtime.device), keep).cpu().contiguous()
            rows = min(mask.shape[0], len(samples) - done)  # a row of padding stands for no sample
            done += rows
            if trouble or not bool(z.isfinite().all()):
                trouble = trouble or f"z of the samples before {samples.start + done} is not finite"
                continue  # the other ranks' forward passes need this one
            pieces = z.view(torch.uint8).split(mask.sum(1)[:rows].tolist())
            column = pa.array([piece.numpy().tobytes() for piece in pieces], SCHEMA.field("z").type)
            try:
                writer.write_batch(pa.record_batch([column], SCHEMA))
            except OSError as error:
                trouble = str(error)
            tell(done)
    try:
        writer.close()
        sync(path)
    except OSError as error:
        trouble = trouble or str(error)
    _refuse_together(trouble)
    return dict(gather_objects((path.name, file_record(path))))


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk of a folder, which need not exist yet."""
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _refuse_together(trouble: str) -> None:
    found = [said for said in gather_objects(trouble) if said]
    if found:
        raise CacheRefused(found[0])
