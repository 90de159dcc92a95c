"""The section `deepspeed`: a mapping, or the path of a JSON file, such as the ds_config of a Hugging Face Trainer.

A key with an equivalent in this project is moved there; "auto" means that key decides. Unsupported settings are
refused, with the reason and an alternative, and sections that DeepSpeed does not have, which it would ignore. Inside of
its sections DeepSpeed itself refuses unknown keys (`training.zero.engine.refuse_unknown`).
"""

import difflib
import json
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
# Settings that are always on; they may be given.
DONE: dict[str, tuple[Any, ...]] = {
    "optimizer.type": ("AdamW", "Adam"),
    "optimizer.params.betas": ([0.9, 0.999],),
    "optimizer.params.eps": (1e-8,),
    "fp16.enabled": (False,),
    "zero_optimization.offload_param.device": ("none",),
    "zero_optimization.cpu_offload": (False,),
    **{
        f"activation_checkpointing.{key}": (False, None)
        for key in (
            *("partition_activations", "number_checkpoints", "contiguous_memory_optimization"),
            *("synchronize_checkpoint_boundary", "profile", "cpu_checkpointing"),
        )
    },
}
# A section is ignored if its switch has one of these values (None: no switch).
SWITCHES: dict[str, tuple[Any, ...]] = {
    "fp16.enabled": (False, None),
    "zero_optimization.offload_param.device": ("none", None),
    "zero_optimization.offload_optimizer.device": ("none",),
}
REFUSED = {
    "optimizer": "AdamW, and stages.N.lr and .lr_groups for the rates",
    "scheduler": "auto; stages.N.schedule and .warmup_steps decide",
    "fp16": f"train.precision bf16 or fp32 ({NO_FP16})",
    "amp": "train.precision bf16 or fp32",
    "torch_autocast": "train.precision bf16 or fp32",
    "data_types": "nothing: it follows from train.precision and parallel.zero_stage",
    "tensor_parallel": "parallel.vocab_group_size, or .sequence_group_size for long texts",
    "activation_checkpointing": "model.gradient_checkpointing",
    **dict.fromkeys(("pipeline", "hybrid_engine", "data_efficiency", "autotuning"), "nothing: no run here uses it"),
    "zero_optimization.cpu_offload": "parallel.offload: optimizer",
    "zero_optimization.offload_param": "no offload of parameters: each forward pass reads all of them. "
    "parallel.zero_stage 3 divides them over the ranks, model.quantize nf4 makes them smaller",
}
# Whatever DeepSpeed reads at the top level: it ignores other names.
_TOP = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    "optimizer scheduler zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer fp16 bf16 amp "
    "torch_autocast data_types gradient_clipping gradient_predivide_factor prescale_gradients gradient_allreduce_op "
    "communication_data_type seq_parallel_communication_data_type disable_allgather steps_per_print dump_state "
    "wall_clock_breakdown memory_breakdown disable_python_gc activation_checkpointing comms_logger flops_profiler "
    "tensorboard wandb csv_monitor comet aio autotuning data_efficiency hybrid_engine pipeline checkpoint compile "
    "tensor_parallel timers dataloader_drop_last log_level vocabulary_size weight_quantization"
)
_SECTIONS = _TOP.split()


def translate(tree: dict[str, Any]) -> None:
    """Rewrite the section of a loaded config in place. Raises `UserError`."""
    given = tree.get("deepspeed")
    if isinstance(given, str):
        tree["deepspeed"] = given = _read(Path(given))
    if not isinstance(given, dict) or not given:
        return
    found = dict(leaves(given))
    for section in given:
        if section not in _SECTIONS:
            meant = difflib.get_close_matches(str(section), _SECTIONS, n=1)
            hint = f"; did you mean {meant[0]}?" if meant else ""
            raise UserError(f"deepspeed.{section}", Said(f"DeepSpeed has no such key{hint}"), "")
    found = _said({path: value for path, value in found.items() if value != "auto"})
    for path in [path for path in found if path in MOVED]:
        _move(tree, path, found.pop(path))
    for path, value in found.items():
        for section in accumulate(path.split("."), "{}.{}".format):
            if section in REFUSED:
                raise UserError(f"deepspeed.{path}", value, REFUSED[section])
    tree["deepspeed"] = _nested(found)


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
