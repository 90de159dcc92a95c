"""z at all label positions of a data set on disk. All ranks write it once; any rank reads it by sample number.

    KEY/                          the folder name is a digest of everything that z depends on
      z-00000.arrow               of rank 0: one row per sample, its number and z [tokens,H] in the run's dtype as bytes
      manifest.json               the key, and size and SHA-256 of each file; written last

The sample order is global and does not depend on the number of ranks. The rank that reads a sample may not be the one
that wrote it, so files are memory-mapped and read by sample. A folder without a manifest is incomplete. No file is
flushed to the disk: a slow one would take longer than the features, and the checksums find what a crash loses.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.parallel.collectives import gather_objects
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.run.files import MANIFEST, file_record, key_digest, read_object, sync, write_atomically

SCHEMA = pa.schema([("sample", pa.int64()), ("z", pa.large_binary())])
ROOM = 1.02  # required free disk space, as a multiple of the cache size


class CacheRefused(Exception):
    """The reason why there is no cache, in one sentence; the same on all ranks."""


def is_cache(folder: Path) -> bool:
    """Whether a folder is a complete or partial cache: its name must be the digest of its key."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    if re.fullmatch(r"\.[0-9a-f]{24}\.[0-9]+\.partial", folder.name):
        return True
    manifest = read_object(folder / MANIFEST)
    return "key" in manifest and key_digest(manifest["key"]) == folder.name


class FeatureShards:
    """A complete cache, memory-mapped."""

    def __init__(self, folder: Path, hidden: int, dtype: torch.dtype) -> None:
        self.folder, self.hidden, self.dtype = folder, hidden, dtype
        files = [pa.ipc.open_file(pa.memory_map(str(path))) for path in sorted(folder.glob("z-*.arrow"))]
        table = pa.concat_tables([file.read_all() for file in files])
        self._z, self._row = table["z"], np.argsort(table["sample"].to_numpy())  # z is not copied

    def read(self, samples: list[int]) -> Tensor:
        """z [N,H] at the label positions of these samples, in order, on the CPU in the run's dtype."""
        parts = [np.frombuffer(self._z[int(self._row[sample])].as_buffer(), np.uint8) for sample in samples]
        rows = np.concatenate([np.empty(0, np.uint8), *parts]).reshape(-1, self.hidden * self.dtype.itemsize)
        return torch.from_numpy(rows).view(self.dtype)


def open_shards(
    folder: Path, key: dict[str, Any], hidden: int, dtype: torch.dtype, runtime: Runtime, fresh: bool = False
) -> FeatureShards | None:
    """The cache of this key; None if any rank finds it missing or damaged.

    fresh: just built, so checksums are not computed again. Collective over the world: the ranks share that work.
    """
    manifest = read_object(folder / MANIFEST)
    try:
        files = sorted(manifest["files"].items())
        good = manifest["key"] == key and all((folder / name).stat().st_size == r["size"] for name, r in files)
        mine = files[runtime.rank :: runtime.world_size]
        good = good and (fresh or all(file_record(folder / name) == record for name, record in mine))
    except (OSError, KeyError, TypeError):
        good = False
    return FeatureShards(folder, hidden, dtype) if all(gather_objects(good)) else None


def build_shards(
    folder: Path,
    key: dict[str, Any],
    batches: Iterable[Batch],
    samples: Sequence[int],
    features: Callable[[Batch, Tensor], Tensor],
    runtime: Runtime,
    show: Callable[[int], None],
) -> None:
    """Write the cache of a key atomically. Collective over the world.

    batches: this rank's `samples` in this order; all ranks have the same number of batches (padded). features: z at
    the label positions of a batch. show: called with the number of finished samples. Raises `CacheRefused` on all ranks
    if a disk fails or z is not finite, and passes on errors of `features`.
    """
    first_rank = gather_objects(os.getpid())[0]  # two runs may build the same cache at the same time
    partial = folder.with_name(f".{folder.name}.{first_rank}.partial")
    try:
        # Each rank writes one file
        _together(lambda: partial.mkdir(parents=True) if runtime.is_main else None)
        path = partial / f"z-{runtime.rank:05d}.arrow"
        sink = _together(lambda: pa.OSFile(str(path), "wb"), f"rank {runtime.rank} does not see {partial}: ")
        writer = pa.ipc.new_file(sink, SCHEMA)
        trouble, done = "", 0
        with torch.no_grad():
            for batch in batches:
                mask, keep = batch.learnt_mask, batch.learnt.to(runtime.device)
                z = features(batch.to(runtime.device), keep).cpu().contiguous()
                rows = min(mask.shape[0], len(samples) - done)  # the last rows may be padding
                own = samples[done : done + rows]
                done += rows
                if trouble or not bool(z.isfinite().all()):
                    trouble = trouble or f"z of one of the samples {list(own)} is not finite"
                    continue  # keep computing: under ZeRO-3 the forward passes are collective
                pieces = z.view(torch.uint8).split(mask.sum(1)[:rows].tolist())
                column = pa.array([piece.numpy().tobytes() for piece in pieces], SCHEMA.field("z").type)
                numbers = pa.array(own, SCHEMA.field("sample").type)
                try:
                    writer.write_batch(pa.record_batch([numbers, column], SCHEMA))
                except OSError as error:
                    trouble = str(error)
                show(done)

        def finish() -> dict[str, Any]:
            if trouble:
                raise OSError(trouble)
            writer.close()
            sink.close()
            return file_record(path)

        files = dict(gather_objects((path.name, _together(finish))))

        # The manifest last: a folder without one is no cache
        def publish() -> None:
            if runtime.is_main:
                write_atomically(partial / MANIFEST, json.dumps({"key": key, "files": files}, indent=1))
                shutil.rmtree(folder, ignore_errors=True)
                partial.rename(folder)
                sync(folder.parent)

        _together(publish)
    finally:
        if runtime.is_main:
            shutil.rmtree(partial, ignore_errors=True)


def _together(action: Callable[[], Any], what: str = "") -> Any:
    """Run an action on each rank. Raises `CacheRefused` on all ranks if it raises OSError on any rank."""
    result, trouble = None, ""
    try:
        result = action()
    except OSError as error:
        trouble = f"{what}{error}"
    if found := [text for text in gather_objects(trouble) if text]:
        raise CacheRefused(found[0])
    return result
