"""Feature cache: while only the heads train, z is read from disk instead of computed.

A stage without `embedding` and `lora` runs the features without a graph and in eval mode. So z of a sample is the same
in each epoch, even with dropout. The key of a cache includes everything that z depends on (`FeatureCache._key`).

Building a cache costs one pass over the data. Mode `auto` builds one only if the stage has more than one epoch left and
the disk has room. An existing cache is always used, so resuming changes nothing. Losses equal those without a cache, up
to the rounding of different batch shapes. The cache has no columns beside z: the start is fitted to cached z before
these exist.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.config.errors import UserError
from cqwen_dist.config.training import FeatureCacheConfig
from cqwen_dist.data.dataset import TextDataset
from cqwen_dist.data.loader import EvalLoader, Loader
from cqwen_dist.parallel.collectives import gather_objects
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.run.environment import versions
from cqwen_dist.run.files import FEATURE_CACHE, free_bytes, key_digest
from cqwen_dist.training.features.shards import ROOM, CacheRefused, FeatureShards, build_shards, is_cache, open_shards
from cqwen_dist.training.stages import StagePlan
from cqwen_dist.training.telemetry.progress import Progress
from cqwen_dist.training.zero.engine import Engine


@dataclass
class FeatureCache:
    """Decides for each stage, builds or opens the cache, and reads z of the next step."""

    settings: FeatureCacheConfig
    run_folder: Path
    runtime: Runtime
    engine: Engine
    features: Callable[[Batch, Tensor], Tensor]  # computes z at the label positions of a batch
    depends: Mapping[str, Any]  # further parts of the key: digests and model keys that z depends on
    progress: Progress

    def __post_init__(self) -> None:
        self.dtype = torch.bfloat16 if self.engine.settings.bf16 else torch.float32
        named = self.settings.dir
        self.folder = self.run_folder / FEATURE_CACHE if named is None else Path(named).expanduser()
        self._loader: Loader | None = None
        self._shards: FeatureShards | None = None

    def enter(self, plan: StagePlan, step: int, loader: Loader) -> None:
        """Start or resume a stage, with a cache if possible. Collective over the world.

        Raises `UserError` if a cache is required and impossible.
        """
        self._loader = loader
        self._shards = None if self.settings.mode == "never" else self._shards_of(plan, step, loader, self.progress.say)
        self._delete_others(None if self._shards is None else self._shards.folder)

    def reader(self, plan: StagePlan, loader: Loader, other: Loader) -> Callable[[Batch, Tensor], Tensor] | None:
        """A function that returns z [N,H] of the batches of `other`'s first step, in order; None without a cache.

        Builds the cache of a stage before it starts; loader: the loader of this stage. Collective over the world.
        Raises as `enter`.
        """
        if self.settings.mode == "never" or other.dataset is not loader.dataset:
            return None
        self._shards = shards = self._shards_of(plan, plan.start, loader, lambda line: None)
        if shards is None:
            return None
        mine, size = other.mine(0, 0), other.micro_batch_size
        samples = iter([mine[k * size : (k + 1) * size] for k in range(other.micro_steps)])

        def read(batch: Batch, keep: Tensor) -> Tensor:
            z = shards.read(next(samples)).to(keep.device)[torch.isin(batch.learnt, keep)]
            return self.engine.model.with_beside(z, batch, keep)

        return read

    def _shards_of(
        self, plan: StagePlan, step: int, loader: Loader, say: Callable[[str], None]
    ) -> FeatureShards | None:
        """The cache of a stage from a step on. Without a cache prints the reason and returns None."""
        left = (plan.stop - step) / loader.steps_per_epoch
        try:
            if trained := sorted(plan.stage.groups & {"embedding", "lora"}):
                verb = "trains" if len(trained) == 1 else "train"
                raise CacheRefused(f"{' and '.join(trained)} {verb} in this stage, so z is another at every step")
            if loader.parts > 1:
                raise CacheRefused("z of a text is on several ranks (parallel.sequence_group_size)")
            # A cache that is there is always used
            dataset, rank, world = loader.dataset, self.runtime.rank, self.runtime.world_size
            assert isinstance(dataset, TextDataset)
            hidden = self.engine.model.config.hidden_size
            key = self._key(dataset)
            folder = self.folder / key_digest(key)
            found = self._shards  # of the start, or of the stage before
            if found is None or found.folder != folder:
                found = open_shards(folder, key, hidden, self.dtype, self.runtime)
            if found is not None:
                say(f"  feature cache: {folder}")
                return found

            # Another is built where it pays and has room
            if self.settings.mode != "require" and left <= 1.0:
                raise CacheRefused(f"the stage has {left:.2g} of an epoch left: no text would be read twice")
            self._refuse_size(dataset.report.tokens * hidden * self.dtype.itemsize)
            batches = EvalLoader(dataset, rank=rank, world=world, micro_batch_size=loader.micro_batch_size)
            # The longest first: texts of similar length need no padding
            mine = batches.samples = sorted(batches.samples, key=(-dataset.lengths()).tolist().__getitem__)
            show = partial(self.progress.part, "feature cache", of=len(mine))
            began = time.monotonic()
            build_shards(folder, key, batches, mine, lambda *at: self.features(*at)[:, :hidden], self.runtime, show)
            found = open_shards(folder, key, hidden, self.dtype, self.runtime, fresh=True)
            if found is None:
                raise CacheRefused(
                    f"{folder} is not seen alike by all ranks (train.feature_cache.dir: a shared folder)"
                )
            self.progress.say(f"  feature cache made in {time.monotonic() - began:.1f} s: {folder}")
            return found
        except CacheRefused as refusal:
            if self.settings.mode == "require":
                allowed = f"auto: stages.{plan.index}: {refusal}"
                raise UserError("train.feature_cache.mode", "require", allowed) from None
            say(f"  no feature cache: {refusal}")
            return None

    def next(self) -> list[Tensor] | None:
        """z [N,H] on the CPU for each micro-batch of the loader's next step; None without a cache."""
        if self._shards is None or self._loader is None:
            return None
        loader = self._loader
        mine, size = loader.mine(loader.epoch, loader.step), loader.micro_batch_size
        return [self._shards.read(mine[k * size : (k + 1) * size]) for k in range(loader.micro_steps)]

    def close(self) -> None:
        """Delete the caches in the run folder at the end of the run."""
        self._shards = None
        self._delete_others(None)

    def _delete_others(self, kept: Path | None) -> None:
        """Delete caches of other stages in the run folder. A folder named by the user may serve other runs."""
        own = self.settings.dir is None and self.folder.is_dir() and not self.folder.is_symlink()
        if not self.runtime.is_main or not own:
            return
        for found in self.folder.iterdir():
            if found != kept and is_cache(found):
                shutil.rmtree(found, ignore_errors=True)
        if kept is None:
            with suppress(OSError):  # not empty
                self.folder.rmdir()

    def _refuse_size(self, size: int) -> None:
        """Raises `CacheRefused` if the cache is too large. size: upper bound in bytes."""
        free = min(gather_objects(free_bytes(self.folder)))
        if size * ROOM > free:
            raise CacheRefused(f"it takes {size / 2**30:.3g} GiB, {self.folder} has {free / 2**30:.3g} GiB free")

    def _key(self, dataset: TextDataset) -> dict[str, Any]:
        """Everything that z depends on. Collective over the world."""
        trained, _, _ = self.engine.feature_state()
        weights = hashlib.sha256()
        for name, value in sorted(trained.items()):
            weights.update(name.encode())
            weights.update(value.numpy().tobytes())
        packages = versions()
        return {
            "format": 4,
            **self.depends,
            "trained": weights.hexdigest(),
            "data": dataset.digest(),
            "dtype": str(self.dtype),
            "device": self.runtime.device.type,
            "versions": {name: packages[name] for name in ("torch", "transformers", "peft")},
        }
