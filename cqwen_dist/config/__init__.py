"""What a run is: one YAML file, checked before anything is started (floor 0: no torch, reads only)."""

from cqwen_dist.config.base_model import TRAIN_TOKENIZER, ModelConfig, PretrainConfig
from cqwen_dist.config.data import DataConfig, NumberPolicy, refuse_missing
from cqwen_dist.config.errors import UserError
from cqwen_dist.config.ranks import refuse_ranks
from cqwen_dist.config.reading import changed_keys, given_config, json_schema, load_config
from cqwen_dist.config.schema import Config, FeatureCacheConfig, ParallelConfig, RunConfig, TrainConfig
from cqwen_dist.config.training import (
    GROUPS,
    HEADS,
    JUDGED,
    ConstraintConfig,
    LoraConfig,
    LossConfig,
    Ramp,
    Stage,
    Until,
    rises,
)

__all__ = [
    "GROUPS",
    "HEADS",
    "JUDGED",
    "TRAIN_TOKENIZER",
    "Config",
    "ConstraintConfig",
    "DataConfig",
    "FeatureCacheConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "NumberPolicy",
    "ParallelConfig",
    "PretrainConfig",
    "Ramp",
    "RunConfig",
    "Stage",
    "TrainConfig",
    "Until",
    "UserError",
    "changed_keys",
    "given_config",
    "json_schema",
    "load_config",
    "refuse_missing",
    "refuse_ranks",
    "rises",
]
