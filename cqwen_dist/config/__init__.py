"""A run's settings: one YAML file, checked before anything starts (floor 0: no torch, reads only)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cqwen_dist.config.errors import DiskError, Said, UserError, printable, reason_of, refuse_ranks, writing

if TYPE_CHECKING:
    from cqwen_dist.config.base_model import TRAIN_TOKENIZER, ModelConfig, PretrainConfig
    from cqwen_dist.config.data import DataConfig, NumberPolicy, as_list, source_files
    from cqwen_dist.config.keys import json_schema
    from cqwen_dist.config.reading import changed_keys, flat, given_config, load_config
    from cqwen_dist.config.schema import Config, FeatureCacheConfig, ParallelConfig, RunConfig, TrainConfig
    from cqwen_dist.config.training import JUDGED, ConstraintConfig, LoraConfig, LossConfig, Ramp, Stage, Until, rises

__all__ = ["JUDGED", "TRAIN_TOKENIZER", "Config", "ConstraintConfig", "DataConfig", "DiskError"]
__all__ += ["FeatureCacheConfig", "LoraConfig", "LossConfig", "ModelConfig", "NumberPolicy"]
__all__ += ["ParallelConfig", "PretrainConfig", "Ramp", "RunConfig", "Said", "Stage", "TrainConfig", "Until"]
__all__ += ["UserError", "as_list", "changed_keys", "flat", "given_config", "json_schema", "load_config"]
__all__ += ["printable", "reason_of", "refuse_ranks", "rises", "source_files", "writing"]
_HOMES = ("reading", "keys", "schema", "training", "data", "base_model")


def __getattr__(name: str) -> Any:
    """Import a name on first use: `cqwen --help` needs no schema, which takes half of its import time."""
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
