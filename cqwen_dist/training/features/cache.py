"""Feature cache: while only the heads train, z is read from disk instead of computed.

A stage without `embedding` and `lora` runs the features without a graph and in eval mode. So z of a sample is the same
in each epoch, even with dropout. The key of a cache includes everything that z depends on (`FeatureCache._key`).

A cache grows in parts, each made before the first step that reads it: the first step waits for a few texts only, and a
stop loses one part. Mode `auto` makes a cache only if texts are read twice (by the rest of the stage, or by several
runs of the process) and the disk has room. An existing cache is always used. Runs of one process read and fill one
cache if their keys are equal. A text is always computed in one batch with the same others, whoever reads it first: so
a resumed run continues to the bit, and a run equals itself beside others. Losses equal those without a cache, up to
the rounding of different batch shapes. The cache has no extra columns of the side network: the start is fitted to
cached z before these exist.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.config.schema import FeatureCacheConfig
from cqwen_dist.config.trainable import FEATURE_GROUPS
from cqwen_dist.data.dataset import TextDataset
from cqwen_dist.data.loader import EvalLoader, Loader
from cqwen_dist.heads.beside import before_beside
from cqwen_dist.parallel.collectives import gather_objects
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.run.files import FEATURE_CACHE, free_bytes, versions
from cqwen_dist.training.features.shards import ROOM, CacheRefused, FeatureShards, add_part, is_cache
from cqwen_dist.training.shared import KeptZ, Shared, features_digest
from cqwen_dist.training.stages import StagePlan
from cqwen_dist.training.telemetry.progress import Progress
from cqwen_dist.training.zero.engine import Engine

KEPT = 2**30  # bytes of evaluation features that a rank keeps in memory
FIRST_PART = 8192  # tokens a rank
GROWTH = 8  # a later part has at most an 8th of the stored tokens: some dozens of parts, and a stop loses little


@dataclass(eq=False)
class FeatureCache:
    """Decides for each stage, opens the cache or begins one, and computes and reads z of the next steps."""

    settings: FeatureCacheConfig
    shared: Shared
    runtime: Runtime
    engine: Engine
    features: Callable[[Batch, Tensor], Tensor]  # computes z at the label positions of a batch
    depends: Mapping[str, Any]  # further parts of the key: digests and model keys that z depends on
    progress: Progress

    def __post_init__(self) -> None:
        self.dtype = torch.bfloat16 if self.engine.settings.bf16 else torch.float32
        named = self.settings.dir
        self.folder = self.shared.folder / FEATURE_CACHE if named is None else Path(named).expanduser()
        self._shards: FeatureShards | None = None
        self.shared.caches.add(self)
        self._plan: StagePlan  # of the stage, and its loader
        self._loader: Loader

    def enter(self, plan: StagePlan, step: int, loader: Loader) -> None:
        """Start or resume a stage, with a cache if possible. Collective over the world."""
        self._plan, self._loader = plan, loader
        self._shards = None if self.settings.mode == "never" else self._shards_of(step, loader, self.progress.say)
        self._delete_others()

    def reader(self, plan: StagePlan, loader: Loader, other: Loader) -> Callable[[Batch, Tensor], Tensor] | None:
        """A function that returns z [N,H] of the batches of `other`'s first step, in order; None without a cache.

        Begins the cache of a stage before the stage; loader: the loader of this stage. Collective over the world.
        """
        if self.settings.mode == "never" or other.dataset is not loader.dataset:
            return None
        self._plan = plan
        self._shards = self._shards_of(plan.start, loader, lambda line: None)
        samples = other.indices(0, 0)
        while (shards := self._shards) is not None and not shards.stored(samples).all():
            self._add_part(shards, other, samples)
        if shards is None:
            return None
        mine, size = other.mine(0, 0), other.micro_batch_size
        own = iter([mine[k * size : (k + 1) * size] for k in range(other.micro_steps)])

        def read(batch: Batch, keep: Tensor) -> Tensor:
            z = shards.read(next(own)).to(keep.device)[torch.isin(batch.kept, keep)]
            return self.engine.model.with_beside(z, batch, keep)

        return read

    def _shards_of(self, step: int, loader: Loader, say: Callable[[str], None]) -> FeatureShards | None:
        """The cache of the stage from a step on. Without a cache prints the reason and returns None."""
        left = (self._plan.stop - step) / loader.steps_per_epoch * self.shared.runs
        try:
            if trained := sorted(self._plan.stage.groups & FEATURE_GROUPS.keys()):
                verb = "trains" if len(trained) == 1 else "train"
                raise CacheRefused(f"{' and '.join(trained)} {verb} in this stage, so z is another at every step")
            if loader.parts > 1:
                raise CacheRefused("z of a text is on several ranks (parallel.sequence_group_size)")
            # A cache that is there is always used
            dataset, hidden = loader.dataset, self.engine.model.config.stack_size
            found = FeatureShards(self.folder, self._key(dataset), hidden, self.dtype, len(dataset))
            known = [cache._shards for cache in self.shared.caches]  # of the start, the stage before, other runs
            if same := [each for each in known if each is not None and each.folder == found.folder]:
                found = same[0]
            # A new one begins if it pays and has room
            elif not found.open(self.runtime):
                if left <= 1.0:
                    raise CacheRefused(f"the stage has {left:.2g} of an epoch left: no text would be read twice")
                size = dataset.report.tokens * hidden * self.dtype.itemsize  # at most
                free = min(gather_objects(free_bytes(self.folder)))
                if size * ROOM > free:
                    room = f"{self.folder} has {free / 2**30:.3g} GiB free"
                    raise CacheRefused(f"it takes {size / 2**30:.3g} GiB, {room}")
            say(f"  feature cache: {found.folder}")
            if more := int((~found.stored()).sum()):
                say(f"  z of {more:,} of {len(dataset):,} samples is computed before the first step that reads it")
            return found
        except CacheRefused as refusal:
            self._give_up(refusal, say)
            return None

    def _give_up(self, refusal: CacheRefused, say: Callable[[str], None]) -> None:
        self.close()
        say(f"  no feature cache: {refusal}")

    def fill(self) -> None:
        """Before a step: compute the z that the cache lacks for the loader's next step. Collective over the world."""
        while (shards := self._shards) is not None:
            loader, epoch = self._loader, self._loader.epoch
            if shards.stored(loader.indices(epoch, loader.step)).all():
                return
            steps = range(loader.step, loader.steps_per_epoch)
            self._add_part(shards, loader, [sample for step in steps for sample in loader.indices(epoch, step)])

    def _add_part(self, shards: FeatureShards, loader: Loader, samples: Sequence[int]) -> None:
        """Compute a part: z of the first missing ones of `samples`, and of the texts in their blocks."""
        dataset, world, size = loader.dataset, self.runtime.world_size, loader.micro_batch_size
        # Blocks of the data set, not of these samples: a micro-batch a rank, of similar lengths, which need no padding
        lengths = dataset.lengths()
        order, block = np.argsort(-lengths, kind="stable"), world * size
        place = np.argsort(order) // block
        missing = np.asarray(samples)[~shards.stored(samples)]
        found = np.array([*dict.fromkeys(place[missing].tolist())])
        tokens = max(FIRST_PART * world, int(lengths[shards.stored()].sum()) // GROWTH)
        found = found[: 1 + int(np.searchsorted(np.bincount(place, lengths)[found].cumsum(), tokens))]
        whole = found[found < len(order) // block]  # the last block may be smaller: a part by itself
        if len(whole):
            part = order[: len(order) // block * block].reshape(-1, world, size)[whole].swapaxes(0, 1).ravel().tolist()
        else:
            part = order[len(order) // block * block :].tolist()
        batches = EvalLoader(dataset, part, rank=self.runtime.rank, world=world, micro_batch_size=size)
        show = partial(self.progress.part, "feature cache", of=len(batches.samples))
        show(0)  # each part has its own remaining time
        hidden = self.engine.model.config.hidden_size
        try:
            add_part(shards, batches, part, lambda *at: before_beside(self.features(*at), hidden), self.runtime, show)
        except CacheRefused as refusal:
            self._give_up(refusal, self.progress.say)

    def next(self) -> list[Tensor] | None:
        """z [N,H] on the CPU for each micro-batch of the loader's next step; None without a cache."""
        if self._shards is None:
            return None
        loader = self._loader
        mine, size = loader.mine(loader.epoch, loader.step), loader.micro_batch_size
        return [self._shards.read(mine[k * size : (k + 1) * size]) for k in range(loader.micro_steps)]

    def close(self) -> None:
        """Delete the cache in the run folder at the end of the run, unless a different run of this process reads it."""
        self._shards = None
        self._delete_others()

    def _delete_others(self) -> None:
        """Delete caches of other stages in the run folder. A folder named by the user may serve other runs."""
        kept = {cache._shards.folder for cache in self.shared.caches if cache._shards is not None}
        own = self.settings.dir is None and self.folder.is_dir() and not self.folder.is_symlink()
        if not self.runtime.is_main or not own:
            return
        for found in self.folder.iterdir():
            if found not in kept and is_cache(found):
                shutil.rmtree(found, ignore_errors=True)
        if not kept:
            with suppress(OSError):  # not empty
                self.folder.rmdir()

    def _key(self, dataset: TextDataset) -> dict[str, Any]:
        """Everything that z depends on. Collective over the world."""
        packages = versions()
        return {
            "format": 6,
            "width": self.engine.model.config.stack_size,
            **self.depends,
            "trained": features_digest(self.engine),
            "data": dataset.digest(),
            "dtype": str(self.dtype),
            "device": self.runtime.device.type,
            "versions": {name: packages[name] for name in ("torch", "transformers", "peft")},
        }


@dataclass
class KeptFeatures:
    """z of the evaluation batches in memory, computed again only after the features have changed.

    All ranks have the same number of batches, in a fixed order, so metrics are equal to the bit.
    """

    forward: Callable[[Batch, Tensor], Tensor]  # computes z at the label positions of a batch
    check: Callable[[], None]  # called instead if z is kept; may raise
    engine: Engine
    fresh: Callable[[], KeptZ]  # z that runs of this process have computed with the same features
    _z: KeptZ = field(default_factory=KeptZ)
    _known: int = -1

    def __call__(self, i: int, batch: Batch, keep: Tensor) -> Tensor:
        """z [N,H] of the i-th batch at its label positions `keep`, on the device of the batch."""
        if (now := self.engine.feature_changes) != self._known:
            self._z, self._known = KeptZ() if self.engine.features_train else self.fresh(), now
        if i < len(self._z):
            self.check()
            return self._z[i].to(keep.device)
        z = self.forward(batch, keep)
        if i == len(self._z) and not self.engine.features_train:  # not while z changes in each step
            self._z.append(z.detach().cpu())
        return z
