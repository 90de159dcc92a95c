"""z at all label positions of samples, on disk in parts. All ranks write a part; any rank reads it by sample number.

    KEY/                          the folder name is a digest of everything that z depends on
      PART/                       the folder name is a digest of the part's sample numbers
        z-00000.arrow             of rank 0: one row per sample, its number and z [tokens,H] in the run's dtype as bytes
        manifest.json             the key, and size and SHA-256 of each file; written last

The sample order is global and does not depend on the number of ranks. The rank that reads a sample may not be the one
that wrote it, so files are memory-mapped and read by sample. A part is there completely or not at all. No file is
flushed to the disk: a slow one would take longer than the features, and the checksums find data lost in a crash.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.data.loader import EvalLoader
from cqwen_dist.parallel.collectives import from_main_rank, gather_objects
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.run.files import MANIFEST, file_record, key_digest, read_object, sync, write_atomically

SCHEMA = pa.schema([("sample", pa.int64()), ("z", pa.large_binary())])
ROOM = 1.02  # required free disk space, as a multiple of the cache size


class CacheRefused(Exception):
    """The reason why there is no cache, in one sentence; the same on all ranks."""


def is_cache(folder: Path) -> bool:
    """Whether a folder is a cache: its name must be the digest of its parts' key."""
    parts = [] if folder.is_symlink() else folder.glob(f"*/{MANIFEST}")
    return any(key_digest(read_object(part).get("key", {})) == folder.name for part in parts)


class FeatureShards:
    """The parts of a cache that are there, memory-mapped."""

    def __init__(self, root: Path, key: dict[str, Any], hidden: int, dtype: torch.dtype, samples: int) -> None:
        """root: the folder of caches. hidden: H. samples: of the whole data set."""
        self.folder, self.key, self.hidden, self.dtype = root / key_digest(key), key, hidden, dtype
        self._columns: list[pa.ChunkedArray] = []  # z of each file, not copied
        self._place = np.full((samples, 2), -1)  # file and row of each sample

    def open(self, runtime: Runtime) -> bool:
        """Add the parts that are there; False if there are none. Collective over the world.

        The ranks share the work of checksums. A part that any rank finds damaged is deleted.
        """
        whole = f"[0-9a-f]*/{MANIFEST}"  # not the hidden folders of parts that are being written
        found = from_main_rank(lambda: {path.parent: read_object(path) for path in self.folder.glob(whole)})
        parts = {part: known.get("files", {}) for part, known in sorted(found.items()) if known.get("key") == self.key}
        files = [(part, name, record) for part, known in parts.items() for name, record in known.items()]
        mine = range(runtime.rank, len(files), runtime.world_size)
        damaged = {file[0] for i, file in enumerate(files) if not _whole(*file, i in mine)}
        damaged = set().union(*gather_objects(damaged))
        for part in parts:
            if part not in damaged:
                self.add(part)
            elif runtime.is_main:
                shutil.rmtree(part, ignore_errors=True)
        return bool(parts)

    def add(self, part: Path) -> None:
        for path in sorted(part.glob("z-*.arrow")):
            with pa.memory_map(str(path)) as file:  # data that is read stays mapped, and no file stays open
                table = pa.ipc.open_file(file).read_all()
            numbers = table["sample"].to_numpy()
            self._place[numbers] = np.stack([np.full(len(numbers), len(self._columns)), np.arange(len(numbers))], 1)
            self._columns.append(table["z"])

    def stored(self, samples: Sequence[int] | slice = slice(None)) -> np.ndarray:
        """[len(samples)] bool: whether z of a sample is there."""
        return self._place[samples, 0] >= 0

    def read(self, samples: list[int]) -> Tensor:
        """z [N,H] at the label positions of these samples, in order, on the CPU in the run's dtype."""
        rows = [self._columns[file][row].as_buffer() for file, row in self._place[samples].tolist()]
        parts = [np.frombuffer(row, np.uint8) for row in rows]
        flat = np.concatenate([np.empty(0, np.uint8), *parts]).reshape(-1, self.hidden * self.dtype.itemsize)
        return torch.from_numpy(flat).view(self.dtype)


def _whole(part: Path, file: str, record: Any, hashed: bool) -> bool:
    """Whether this rank sees the file in its size and, if `hashed`, with its checksum."""
    try:
        return bool(
            (part / file).stat().st_size == record["size"] and (not hashed or file_record(part / file) == record)
        )
    except (OSError, KeyError, TypeError):
        return False


def add_part(
    shards: FeatureShards,
    batches: EvalLoader,
    samples: Sequence[int],
    features: Callable[[Batch, Tensor], Tensor],
    runtime: Runtime,
    show: Callable[[int], None],
) -> None:
    """Compute and write a part of a cache atomically, and add it. Collective over the world.

    samples: those of the part; batches: of this rank's share of them. features: z at the label positions of a batch.
    show: called with the number of finished samples. Raises `CacheRefused` on all ranks if a disk fails or z is not
    finite, and passes on errors of `features`.
    """
    first_rank = gather_objects(os.getpid())[0]  # two runs may make the same part at the same time
    folder = shards.folder / key_digest({"samples": sorted(samples)})
    partial = folder.with_name(f".{folder.name}.{first_rank}.partial")
    try:
        # Each rank writes one file
        _together(lambda: partial.mkdir(parents=True) if runtime.is_main else None)
        path = partial / f"z-{runtime.rank:05d}.arrow"
        sink = _together(lambda: pa.OSFile(str(path), "wb"), f"rank {runtime.rank} does not see {partial}: ")
        writer = pa.ipc.new_file(sink, SCHEMA)
        trouble, done, mine = "", 0, batches.samples
        writes: list[Future[None]] = []
        with torch.no_grad(), ThreadPoolExecutor(1) as pool:  # writes while the next z is computed
            for batch in batches:
                counts, keep = batch.label_mask.sum(1).numpy(), batch.kept.to(runtime.device)
                z = features(batch.to(runtime.device), keep).contiguous()
                finite = z.isfinite().all()
                rows = min(len(counts), len(mine) - done)  # the last rows may be padding
                own = mine[done : done + rows]
                done += rows
                if trouble or not bool(finite):
                    trouble = trouble or f"z of one of the samples {list(own)} is not finite"
                    continue  # keep computing: under ZeRO-3 the forward passes are collective
                ends = np.append(0, counts[:rows].cumsum()) * shards.hidden * shards.dtype.itemsize
                buffers = [None, *(pa.py_buffer(part) for part in (ends, z.cpu().view(torch.uint8).numpy()))]
                column = pa.Array.from_buffers(SCHEMA.field("z").type, rows, buffers)  # without a copy
                numbers = pa.array(own, SCHEMA.field("sample").type)
                wait(writes[-1:])  # two z are in memory at most
                writes.append(pool.submit(writer.write_batch, pa.record_batch([numbers, column], SCHEMA)))
                show(done)

        def finish() -> dict[str, Any]:
            if trouble:
                raise OSError(trouble)
            for write in writes:
                write.result()
            writer.close()
            sink.close()
            return file_record(path)

        files = dict(gather_objects((path.name, _together(finish))))

        # The manifest last: a folder without one is no part
        def publish() -> None:
            if runtime.is_main:
                write_atomically(partial / MANIFEST, json.dumps({"key": shards.key, "files": files}, indent=1))
                if not folder.exists():  # another run may have made it meanwhile, and read it now
                    partial.rename(folder)
                    sync(folder.parent)

        _together(publish)
        shards.add(folder)
        if not all(gather_objects(bool(shards.stored(samples).all()))):
            raise CacheRefused(f"{folder} is not seen alike by all ranks (train.feature_cache.dir: a shared folder)")
    finally:
        if runtime.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            with suppress(OSError):  # not empty
                shards.folder.rmdir()


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
