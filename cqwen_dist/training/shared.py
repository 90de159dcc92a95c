"""Shared by the runs of one process: the base's weights, texts, measures of the base, z."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet, WeakValueDictionary

from torch import Tensor

from cqwen_dist.config.schema import Config
from cqwen_dist.config.trainable import is_lora, is_magnitude
from cqwen_dist.model.base_loading import with_own_modules
from cqwen_dist.training.zero.engine import Engine

T = TypeVar("T")


class KeptZ(list[Tensor]):
    """z of evaluation batches; a list that is forgotten when no run reads it."""


@dataclass
class Shared:
    """Empty at first: the first run that needs a thing makes it. All ranks ask for the same, in the same order."""

    folder: Path  # of the first run: its feature cache and digests of files serve all
    runs: int = 1
    caches: WeakSet[Any] = field(default_factory=WeakSet)  # the runs' `FeatureCache`s
    _made: dict[object, Any] = field(default_factory=dict)
    _kept: WeakValueDictionary[object, KeptZ] = field(default_factory=WeakValueDictionary)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What `make` returns, from the first call with this key."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def called(self, config: Config) -> str:
        """A run's name in front of its lines; empty for the only run."""
        return "" if self.runs == 1 else config.run.name or Path(config.run.dir).name

    def base(self, load: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """What `load` returns, a base model first. Several runs share its weights; each has its own modules."""
        if self.runs == 1:
            return load()
        model, *files = self.once("base", load)
        return with_own_modules(model), *files

    def kept(self, engine: Engine, of: object) -> KeptZ:
        """z of the evaluation batches `of`, for all runs whose features are equal now. Collective over the world."""
        return self._kept.setdefault((features_digest(engine), of), KeptZ())


def features_digest(engine: Engine) -> str:
    """A digest of all parameters before z that any stage trains, without adapters with B = 0, which add nothing.
    Collective over the world."""
    trained, _, _ = engine.feature_state()
    weights = hashlib.sha256()
    for name, value in sorted(trained.items()):
        if is_lora(name) and not is_magnitude(name) and not trained[name.replace("_A.", "_B.")].any():
            continue
        weights.update(name.encode())
        weights.update(value.numpy().tobytes())
    return weights.hexdigest()
