"""DeepSpeed's configuration, derived from the run's config and the user's additions; conflicts are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cqwen_dist.config import Config, UserError

# Settings of ours that the user may change: they concern speed and logging, not results.
TUNABLE = {
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size",
    "steps_per_print",
    "wall_clock_breakdown",
}
# Settings that we do not make but that would contradict the config -> what sets them instead.
ELSEWHERE = {
    "optimizer": "stages (AdamW with a schedule for each group)",
    "scheduler": "stages",
    "fp16": "train.precision: fp32 or bf16",
    "amp": "train.precision: fp32 or bf16",
    "torch_autocast": "train.precision: fp32 or bf16",
    "data_types": "nothing: it follows from train.precision and parallel.zero_stage",
    "zero_optimization.offload_optimizer": "parallel.offload",
    "zero_optimization.offload_param": "nothing: frozen parameters stay on the device",
}
# Settings of ours -> the keys that they follow from.
FOLLOWS = {
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "train_batch_size": "train.micro_batch_size and the number of ranks",
    "gradient_accumulation_steps": "train.global_batch_size; the trainer accumulates itself",
    "gradient_clipping": "train.max_grad_norm",
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.offload_optimizer.device": "parallel.offload",
    "bf16.enabled": "train.precision",
}


@dataclass(frozen=True)
class EngineSettings:
    """What `training.zero.engine` takes from a config."""

    thresholds: str
    class_bias: bool  # whether it trains
    betas: tuple[float, float]
    weight_decay: float
    lr_ratio_b: float  # the rate of the adapters' B matrices, as a multiple of A's
    max_grad_norm: float | None
    bf16: bool
    zero_stage: int
    offload: bool  # whether optimizer states are on the host
    deepspeed: Callable[[int], dict[str, Any]]  # number of parameters that the engine trains -> DeepSpeed's config


def engine_settings(config: Config, world_size: int) -> EngineSettings:
    """The engine's settings on so many ranks."""
    train = config.train
    return EngineSettings(
        thresholds=train.thresholds,
        class_bias=train.train_class_bias,
        betas=train.betas,
        weight_decay=train.weight_decay,
        lr_ratio_b=config.model.lora.lr_ratio,
        max_grad_norm=config.max_grad_norm,
        bf16=train.precision == "bf16",
        zero_stage=config.parallel.zero_stage,
        offload=config.parallel.offload == "optimizer",
        deepspeed=partial(deepspeed_config, config, world_size),
    )


def deepspeed_config(config: Config, world_size: int, trained: int) -> dict[str, Any]:
    """The config for `deepspeed.initialize`. trained: parameters that the engine trains (`feature_parameters`).

    Raises `UserError` for an addition under `deepspeed:` that contradicts the rest of the config.
    """
    stage = config.parallel.zero_stage
    bf16 = config.train.precision == "bf16"
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        # The trainer accumulates: a step may have fewer micro-batches at the end of an epoch, so it sets the boundary
        # and scales the loss by global counts.
        "gradient_accumulation_steps": 1,
        "train_batch_size": config.train.micro_batch_size * world_size,
        "gradient_clipping": 1.0,  # the engine hands it the norm divided by the step's limit
        "zero_optimization": {
            "stage": stage,
            # One bucket for all that trains: DeepSpeed's default of 5e8 numbers takes 1 to 2 GB.
            "reduce_bucket_size": trained,
            "allgather_bucket_size": trained,
        },
        "bf16": {"enabled": bf16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},  # it would wait for the device twice a step
    }
    if bf16 and stage >= 2:  # in stage 1 DeepSpeed would take an optimizer that cannot join the heads' norm
        result["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.parallel.offload == "optimizer":
        result["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return _merge(result, config.deepspeed, "")


def _merge(ours: dict[str, Any], added: dict[str, Any], above: str) -> dict[str, Any]:
    merged = dict(ours)
    for key, value in added.items():
        path = f"{above}{key}"
        mine = ours.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            merged[key] = _merge(mine, value, f"{path}.")
        elif key not in ours and path in ELSEWHERE:
            raise UserError(f"deepspeed.{path}", value, f"this to be left to {ELSEWHERE[path]}")
        elif key in ours and path not in TUNABLE and value != mine:
            reason = f" (it follows from {FOLLOWS[path]})" if path in FOLLOWS else ""
            raise UserError(f"deepspeed.{path}", value, f"{mine!r}{reason}")
        else:
            merged[key] = value
    return merged
