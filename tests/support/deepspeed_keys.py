"""What the installed DeepSpeed reads of its config, found in its own code."""

import inspect
import random
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.config import DeepSpeedConfig, HybridEngineConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel

MODELS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "compile": CompileConfig,
    "hybrid_engine": HybridEngineConfig,
    "tensor_parallel": TPTrainingConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    **{"tensorboard": TensorBoardConfig, "wandb": WandbConfig, "csv_monitor": CSVConfig, "comet": CometConfig},
}
# Of sections that DeepSpeed reads without a model.
MORE: dict[str, Any] = {
    "checkpoint.load_universal": False,
    "checkpoint.use_node_local_storage": False,
    "checkpoint.tag_validation": "WARN",
    "checkpoint.parallel_write.pipeline_stage": False,
    "comms_logger.enabled": False,
    "comms_logger.verbose": False,
    "flops_profiler.enabled": False,
    "flops_profiler.profile_step": 1,
    "flops_profiler.module_depth": -1,
    "flops_profiler.top_modules": 1,
    "flops_profiler.detailed": True,
    "flops_profiler.output_file": None,
    "data_types.grad_accum_dtype": None,
    "torch_autocast.enabled": False,
    "activation_checkpointing.partition_activations": False,
    "gradient_allreduce_op": "mean",
    "gradient_predivide_factor": 1.0,
    "managed_gradient_accumulation": True,
    "zero_allow_untested_optimizer": True,  # not its default, but what the engine needs
    "communication_data_type": None,
    "seq_parallel_communication_data_type": "fp32",
    "steps_per_print": None,
    "log_level": None,
    **dict.fromkeys(("aio.block_size", "pipeline.stages", "expert_parallel.enabled", "vocabulary_size")),
    **dict.fromkeys(("autotuning.enabled", "data_efficiency.enabled", "weight_quantization.enabled"), False),
    **dict.fromkeys(("dump_state", "disable_python_gc", "memory_breakdown", "wall_clock_breakdown"), False),
    **dict.fromkeys(("prescale_gradients", "disable_allgather", "dataloader_drop_last", "datastates_ckpt"), False),
    **dict.fromkeys(("zero_force_ds_cpu_optimizer", "use_data_before_expert_parallelism"), False),
}


class Key(NamedTuple):
    """A leaf: its path, the types that DeepSpeed declares, its default."""

    path: str
    types: tuple[Any, ...]
    default: Any


def _leaves(model: type[BaseModel], above: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        path = f"{above}.{field.alias or name}"
        types = (field.annotation, *typing.get_args(field.annotation))
        inner = [each for each in types if inspect.isclass(each) and issubclass(each, BaseModel)]
        if inner:
            yield from _leaves(inner[0], path)
        else:
            yield Key(path, types, field.get_default(call_default_factory=True))


def keys() -> list[Key]:
    """All leaves."""
    found = [key for section, model in MODELS.items() for key in _leaves(model, section)]
    return found + [Key(path, (type(default),), default) for path, default in MORE.items()]


class _Asked(dict[str, Any]):
    """A mapping that notes which keys are asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self  # `name in config.keys()`

    def __copy__(self) -> "_Asked":
        return self


def top_level() -> set[str]:
    """The names that DeepSpeed looks for at the top level."""
    mapping = _Asked({"train_micro_batch_size_per_gpu": 1})
    DeepSpeedConfig(mapping)
    return mapping.asked


def other_value(key: Key, draw: random.Random) -> Any:
    """A value of a type that DeepSpeed takes, other than the default."""
    if bool in key.types or isinstance(key.default, bool):
        return not key.default
    if int in key.types:
        return draw.choice([2, 1000, 10**7])
    if float in key.types:
        return 0.5
    return draw.choice(["x", 3, ["x"]])
