"""The section `deepspeed`: settings of ZeRO for which this project has no key. All others are refused by name."""

from cqwen_dist.config.errors import UserError
from cqwen_dist.config.schema import NO_FP16, Config
from cqwen_dist.config.yaml_text import leaves

# Setting -> its least value (bool: true or false), and the values of parallel.zero_stage and .offload with which
# DeepSpeed reads it.
PASSED: dict[str, tuple[int | type[bool], str]] = {
    "zero_optimization.reduce_bucket_size": (1, "1 2 3"),
    "zero_optimization.allgather_bucket_size": (1, "1 2"),
    "zero_optimization.overlap_comm": (bool, "1 2 3"),
    "zero_optimization.round_robin_gradients": (bool, "1 2"),
    "zero_optimization.offload_optimizer.pin_memory": (bool, "optimizer"),
    "zero_optimization.sub_group_size": (1, "3"),
    "zero_optimization.stage3_prefetch_bucket_size": (0, "3"),
    "zero_optimization.stage3_param_persistence_threshold": (0, "3"),
    "zero_optimization.stage3_max_live_parameters": (0, "3"),
    "zero_optimization.stage3_max_reuse_distance": (0, "3"),
}
# Other parts of a ds_config -> what to take instead.
ELSEWHERE = {
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.offload_optimizer": "parallel.offload: optimizer, which keeps optimizer states in host memory",
    "zero_optimization.offload_param": "parallel.zero_stage 3, or model.quantize nf4: a forward pass reads all weights",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "train_batch_size": "train.global_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size and .micro_batch_size, from which it follows",
    "gradient_clipping": "train.max_grad_norm",
    "bf16": "train.precision",
    "fp16": f"train.precision bf16 or fp32 ({NO_FP16})",
    "optimizer": "stages.N.lr, stages.N.lr_groups and train.weight_decay, for AdamW",
    "scheduler": "stages.N.schedule and stages.N.warmup_steps",
    "activation_checkpointing": "model.gradient_checkpointing",
    "tensor_parallel": "parallel.vocab_group_size, or .sequence_group_size for long texts",
    "flops_profiler": "train.profile",
}


def check_section(config: Config) -> None:
    """Raises `UserError` for a setting that is not in `PASSED`, or that DeepSpeed would ignore in this run."""
    here = {str(config.parallel.zero_stage), config.parallel.offload}
    for path, value in leaves(config.deepspeed):
        if value == {}:
            continue
        key = f"deepspeed.{path}"
        if path not in PASSED:
            ours = [there for name, there in ELSEWHERE.items() if f"{path}.".startswith(f"{name}.")]
            raise UserError(key, value, ours[0] if ours else f"only {', '.join(PASSED)}")
        kind, where = PASSED[path]
        if here.isdisjoint(where.split()):
            needed = "offload" if where == "optimizer" else "zero_stage"
            raise UserError(key, value, f"parallel.{needed} {where.replace(' ', ' or ')}: else DeepSpeed ignores it")
        if isinstance(kind, type):
            if not isinstance(value, bool):
                raise UserError(key, value, "true or false")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1 or value < kind:
            raise UserError(key, value, f"a whole number from {kind}")
