"""The section `deepspeed`: a mapping, or the path of a JSON file, such as the ds_config of a Hugging Face Trainer.

A key with an equivalent in this project is moved there; "auto" means that key decides. DeepSpeed is told what it acts
on in this run. All other keys are refused unless they have DeepSpeed's default, with the reason and an alternative.
"""

import difflib
import json
import sys
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.schema import NO_FP16
from cqwen_dist.config.yaml_text import leaves

# DeepSpeed's key -> our key, with our names for its values. Both may be set if they agree.
MOVED: dict[str, tuple[str, dict[Any, Any]]] = {
    "zero_optimization.stage": ("parallel.zero_stage", {}),
    "zero_optimization.offload_optimizer.device": ("parallel.offload", {"cpu": "optimizer"}),
    "train_micro_batch_size_per_gpu": ("train.micro_batch_size", {}),
    "train_batch_size": ("train.global_batch_size", {}),
    "gradient_clipping": ("train.max_grad_norm", {}),
    "bf16.enabled": ("train.precision", {True: "bf16", False: "fp32"}),
    "optimizer.params.weight_decay": ("train.weight_decay", {}),
}
_ACTIVATIONS = (
    "partition_activations number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary profile "
    "cpu_checkpointing"
)
# Settings that are always on; they may be given.
DONE: dict[str, tuple[Any, ...]] = {
    "optimizer.type": ("AdamW", "Adam"),
    "optimizer.params.betas": ([0.9, 0.999],),
    "optimizer.params.eps": (1e-8,),
    "fp16.enabled": (False,),
    "zero_optimization.offload_param.device": ("none",),
    "zero_optimization.cpu_offload": (False,),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (True, False),  # exports have all weights
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (True, False),
    **{f"activation_checkpointing.{key}": (False, None) for key in _ACTIVATIONS.split()},
}
_SWITCHED = (
    "amp torch_autocast hybrid_engine autotuning data_efficiency comms_logger flops_profiler tensorboard wandb "
    "csv_monitor comet weight_quantization"
)
# A section is ignored if its switch has one of these values (None: no switch).
SWITCHES: dict[str, tuple[Any, ...]] = {
    "fp16.enabled": (False, None),
    "zero_optimization.offload_param.device": ("none", None),
    "zero_optimization.offload_optimizer.device": ("none",),
    **{f"{section}.enabled": (False,) for section in _SWITCHED.split()},
}
# What else DeepSpeed is told: key -> (values, where it acts on it (`_WHERE`), its default). Values: a type, the words
# allowed, or the least whole number. tests/config/test_deepspeed_section.py compares this with DeepSpeed.
_STATED = ("dump_state", "disable_python_gc", "memory_breakdown", "wall_clock_breakdown")
PASSED: dict[str, tuple[Any, str, Any]] = {
    "steps_per_print": (1, "all", None),
    "log_level": (("debug", "info", "warning", "error", "critical"), "all", None),
    **{key: (bool, "all", False) for key in _STATED},
    "flops_profiler.enabled": (bool, "all", False),
    "flops_profiler.profile_step": (1, "flops", 1),
    "flops_profiler.top_modules": (1, "flops", 1),
    "flops_profiler.module_depth": ((-1, 0, 1, 2, 3), "flops", -1),
    "flops_profiler.detailed": (bool, "flops", True),
    "flops_profiler.output_file": (str, "flops", None),
    "communication_data_type": (("fp32", "bf16"), "own", None),
    "zero_optimization.reduce_bucket_size": (1, "all", 500_000_000),
    "zero_optimization.allgather_bucket_size": (1, "1 2", 500_000_000),
    "zero_optimization.overlap_comm": (bool, "all", None),
    "zero_optimization.round_robin_gradients": (bool, "1 2", False),
    "zero_optimization.parameter_alignment": (bool, "1 2", False),
    "zero_optimization.reduce_scatter": (bool, "own", True),
    "zero_optimization.contiguous_gradients": (bool, "3", True),
    "zero_optimization.offload_optimizer.pin_memory": (bool, "offload", True),
    "zero_optimization.sub_group_size": (0, "3", 1_000_000_000),
    "zero_optimization.stage3_prefetch_bucket_size": (0, "3", 50_000_000),
    "zero_optimization.stage3_param_persistence_threshold": (0, "3", 100_000),
    "zero_optimization.stage3_model_persistence_threshold": (0, "3", sys.maxsize),
    "zero_optimization.stage3_max_live_parameters": (0, "3", 1_000_000_000),
    "zero_optimization.stage3_max_reuse_distance": (0, "3", 1_000_000_000),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": (bool, "3", False),
    "zero_optimization.stage3_allgather_sequential": (bool, "3", False),
    "zero_optimization.memory_efficient_linear": (bool, "3", True),
    "zero_optimization.log_trace_cache_warnings": (bool, "3", False),
    "zero_optimization.enable_sanity_checks": (bool, "3", False),
}
_WHERE = {
    "3": "parallel.zero_stage 3",
    "1 2": "parallel.zero_stage 1 or 2",
    "own": "parallel.zero_stage 3, parallel.offload optimizer or overlap_comm true",  # its hooks reduce the gradients
    "offload": "parallel.offload optimizer",
    "flops": "flops_profiler.enabled true",
}
# Keys that are refused with any value but DeepSpeed's default. Outside of `zero_optimization`, one that is not here has
# the default false or null.
_OFF = (
    "cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint legacy_stage1 pipeline_loading_checkpoint "
    "save_muon_momentum_buffer_in_memory zero_quantized_weights zero_quantized_nontrainable_weights "
    "zero_quantized_gradients offload_optimizer.nvme_path offload_optimizer.pipeline_read "
    "offload_optimizer.pipeline_write offload_optimizer.fast_init offload_optimizer.super_offload offload_param "
    "zenflow leaf_module"
)
_ON = (
    "allgather_partitions compute_grad_norm load_from_fp32_weights ignore_unused_parameters override_module_apply "
    "use_multi_rank_bucket_allreduce"
)
DEFAULTS: dict[str, Any] = {
    **{f"zero_optimization.{key}": None for key in _OFF.split()},
    **{f"zero_optimization.{key}": True for key in _ON.split()},
    **dict.fromkeys(("managed_gradient_accumulation", "zero_allow_untested_optimizer"), True),
    "bf16.check_grad_overflow": True,
    "gradient_allreduce_op": "mean",
    "gradient_predivide_factor": 1.0,
    "seq_parallel_communication_data_type": "fp32",
    "checkpoint.tag_validation": "WARN",
    "zero_optimization.stage3_module_granularity_threshold": 0,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.offload_optimizer.buffer_count": 4,
    "zero_optimization.offload_optimizer.ratio": 1.0,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": 0.8,
}
_KINDS = {bool: "true or false", str: "a path"}
_OWN = "nothing: no run here reads it"
_FASTER = "model.quantize nf4 for smaller frozen weights, and no quantized traffic: its kernels are not built here"
_NO_NVME = "parallel.offload: optimizer, which keeps all optimizer states in host memory"
REFUSED = {
    "optimizer": "AdamW, and stages.N.lr and .lr_groups for the rates",
    "scheduler": "auto; stages.N.schedule and .warmup_steps decide",
    "fp16": f"train.precision bf16 or fp32 ({NO_FP16})",
    "amp": "train.precision bf16 or fp32",
    "torch_autocast": "train.precision bf16 or fp32",
    "bf16": "train.precision: heads, masters and moments stay fp32",
    "data_types": "nothing: it follows from train.precision and parallel.zero_stage",
    "tensor_parallel": "parallel.vocab_group_size, or .sequence_group_size for long texts",
    "activation_checkpointing": "model.gradient_checkpointing",
    "gradient_accumulation_steps": "auto: it follows from train.global_batch_size, .micro_batch_size and the ranks",
    "managed_gradient_accumulation": "true: the trainer sets the boundaries of an optimizer step",
    "zero_allow_untested_optimizer": "true: the heads' AdamW and the engine's are one step",
    "zero_force_ds_cpu_optimizer": "false: the engine steps with torch's AdamW",
    **dict.fromkeys(
        ("gradient_predivide_factor", "prescale_gradients", "gradient_allreduce_op"),
        "the mean over the ranks, which is that of the heads too",
    ),
    "comms_logger": "nothing: it would count a part, since most collectives here are torch's. cqwen plan has the bytes",
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), "run.tensorboard or run.wandb"),
    "timers": "nothing: RUN/metrics.jsonl has the throughput, without a wait in each step",
    "compile": "model.compile_layers: the engine's own compilation is not started here",
    "checkpoint": "nothing: checkpoints here are not DeepSpeed's, and resume on any number of ranks and ZeRO stage",
    "datastates_ckpt": "nothing: checkpoints here are not DeepSpeed's, and are written in the background",
    "dataloader_drop_last": "nothing: the batches are this project's, and use every text",
    "weight_quantization": "model.quantize",
    "aio": _NO_NVME,
    "vocabulary_size": "nothing: the base decides",
    **dict.fromkeys(("sequence_parallel_size", "seq_parallel_communication_data_type"), "parallel.sequence_group_size"),
    **dict.fromkeys(("pipeline", "hybrid_engine", "data_efficiency", "autotuning", "disable_allgather"), _OWN),
    **dict.fromkeys(("expert_parallel", "use_data_before_expert_parallelism"), _OWN),
    "zero_optimization": _OWN,
    "zero_optimization.cpu_offload": "parallel.offload: optimizer",
    "zero_optimization.offload_optimizer": _NO_NVME,
    "zero_optimization.offload_param": "no offload of parameters: each forward pass reads all of them. "
    "parallel.zero_stage 3 divides them over the ranks, model.quantize nf4 makes them smaller",
    "zero_optimization.cpu_offload_param": "parallel.zero_stage 3, or model.quantize nf4",
    "zero_optimization.leaf_module": "nothing: the trained layers are plain ones",
    "zero_optimization.zenflow": "parallel.offload: optimizer; ZenFlow selects among AdamW states that are not here",
    "zero_optimization.compute_grad_norm": "true: the heads' gradients enter this norm",
    "zero_optimization.ignore_unused_parameters": "true: a stage trains some groups only",
    **{f"zero_optimization.zero_quantized_{key}": _FASTER for key in ("weights", "nontrainable_weights", "gradients")},
}


def translate(tree: dict[str, Any]) -> None:
    """Rewrite the section of a loaded config in place. Raises `UserError`."""
    given = tree.get("deepspeed")
    if isinstance(given, str):
        tree["deepspeed"] = given = _read(Path(given))
    if not isinstance(given, dict) or not given:
        return
    found = _said({path: value for path, value in leaves(given) if value != "auto"})
    for path in [path for path in found if path in MOVED]:
        _move(tree, path, found.pop(path))
    here = _here(tree.get("parallel"), found)
    told = {path: _checked(path, value, here) for path, value in found.items()}
    tree["deepspeed"] = _nested({path: value for path, value in told.items() if value is not None})


def _here(parallel: Any, found: Mapping[str, Any]) -> set[str]:
    """The words of `_WHERE` that hold in this run."""
    given = parallel if isinstance(parallel, dict) else {}
    stage, offload = str(given.get("zero_stage", 1)), given.get("offload") == "optimizer"
    acting = {
        "offload": offload,
        "flops": found.get("flops_profiler.enabled"),
        "own": stage == "3" or offload or found.get("zero_optimization.overlap_comm"),
    }
    return {stage, *(name for name, on in acting.items() if on)}


def _checked(path: str, value: Any, here: set[str]) -> Any:
    """The value for DeepSpeed; None if it is its default and not acted on here. Raises `UserError`."""
    above, _, name = path.rpartition(".")
    if (known := PASSED.get(path) or PASSED.get(f"{above}.stage3_{name}")) is None:
        _refuse(path, value)
        return None
    kind, where, default = known
    if value is None:
        return None
    if "all" not in where and here.isdisjoint(where.split()):
        if value == default:
            return None
        raise UserError(f"deepspeed.{path}", value, f"{default}, or with {_WHERE[where]}: else DeepSpeed ignores it")
    if isinstance(kind, int):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= kind and value % 1 == 0:
            return int(value)
        raise UserError(f"deepspeed.{path}", value, f"a whole number from {kind}")
    if not (isinstance(value, kind) if isinstance(kind, type) else value in kind):
        allowed = _KINDS[kind] if isinstance(kind, type) else ", ".join(map(str, kind))
        raise UserError(f"deepspeed.{path}", value, allowed)
    return value


def _refuse(path: str, value: Any) -> None:
    """Raises `UserError` for a key that no run acts on, unless its value is DeepSpeed's default."""
    known = {*PASSED, *DEFAULTS, *DONE, *MOVED}
    if any(key.startswith(f"{path}.") for key in known) and value not in (None, {}):
        raise UserError(f"deepspeed.{path}", value, "a mapping")
    sections = list(accumulate(path.split("."), "{}.{}".format))
    reasons = [REFUSED[section] for section in sections if section in REFUSED]
    own = sections[:2] if sections[0] == "zero_optimization" else sections[:1]  # as far as DeepSpeed's names are known
    if own[-1] not in {".".join(key.split(".")[: len(own)]) for key in (*known, *REFUSED)}:
        names = {key.split(".")[len(own) - 1] for key in known if key.startswith(own[0]) or len(own) == 1}
        meant = difflib.get_close_matches(sections[-1].rpartition(".")[2], sorted(names), n=1)
        hint = f"; did you mean {meant[0]}?" if meant else ""
        raise UserError(f"deepspeed.{path}", Said(f"DeepSpeed has no such key{hint}"), "")
    if value not in (None, {}, DEFAULTS.get(path) or False):
        raise UserError(f"deepspeed.{path}", value, reasons[-1])


def _nested(leaves: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in leaves.items():
        *above, last = path.split(".")
        at = found
        for part in above:
            at = at.setdefault(part, {})
        at[last] = value
    return found


def _said(leaves: dict[str, Any]) -> dict[str, Any]:
    """Drop sections that are switched off and settings that are always on."""
    for switch, off in SWITCHES.items():
        if leaves.get(switch) in off:
            section = switch.rpartition(".")[0]
            leaves = {path: v for path, v in leaves.items() if path == switch or not path.startswith(f"{section}.")}
    if not any(path.startswith("scheduler.params") for path in leaves):
        leaves.pop("scheduler.type", None)
    return {path: value for path, value in leaves.items() if value not in DONE.get(path, ())}


def _read(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        allowed = f"a mapping, or a JSON file with one ({getattr(error, 'strerror', None) or error})"
        raise UserError("deepspeed", str(path), allowed) from None
    if not isinstance(found, dict):
        raise UserError("deepspeed", found, f"a mapping in {path}")
    return found


def _move(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set our key to DeepSpeed's value. Raises `UserError` if ours is set to a different value."""
    key, values = MOVED[path]
    section, _, name = key.partition(".")
    theirs = values.get(value, value) if isinstance(value, (str, bool)) else value
    if (ours := tree.get(section)) is None:
        ours = tree[section] = {}
    if not isinstance(ours, dict):
        return  # the schema refuses it
    if ours.setdefault(name, theirs) != theirs:
        raise UserError(f"deepspeed.{path}", value, f"auto, or what {key} says ({ours[name]})")
