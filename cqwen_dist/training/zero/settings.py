"""The DeepSpeed config, derived from the run's config and the user's additions (`config.deepspeed_section`)."""

from typing import Any

from cqwen_dist.config.schema import Config


def deepspeed_config(config: Config, world_size: int, trained: int) -> dict[str, Any]:
    """The config for `deepspeed.initialize`. trained: number of parameters that the engine trains."""
    stage = config.parallel.zero_stage
    bf16 = config.train.precision == "bf16"
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        # The trainer accumulates: the last step of an epoch may have fewer micro-batches. So it sets the boundary, and
        # it scales the loss by global counts.
        "gradient_accumulation_steps": 1,
        "train_batch_size": config.train.micro_batch_size * world_size,
        "gradient_clipping": 1.0,  # the engine passes the norm divided by this step's limit
        "zero_optimization": {
            "stage": stage,
            # One bucket for all trained parameters: DeepSpeed's default of 5e8 values takes 1 to 2 GB.
            "reduce_bucket_size": trained,
            "allgather_bucket_size": trained,
        },
        "bf16": {"enabled": bf16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "timers": {"throughput": {"enabled": False}},  # it would synchronise twice per step
    }
    if bf16 and stage >= 2:  # in stage 1 this selects an optimizer that cannot include the heads' norm
        result["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.parallel.offload == "optimizer":
        result["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    zero: dict[str, Any] = result["zero_optimization"]
    for key, added in config.deepspeed.get("zero_optimization", {}).items():
        zero[key] = {**zero.get(key, {}), **added} if isinstance(added, dict) else added
    zero["allgather_bucket_size"] += zero["allgather_bucket_size"] % 2
    return result
