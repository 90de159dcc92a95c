"""The section `deepspeed`: a mapping, or the path of a JSON file, such as the ds_config of a Hugging Face Trainer.

A key with an equivalent in this project is moved there; "auto" means that key decides. Unsupported settings and keys
unknown to DeepSpeed are refused, with the reason and an alternative.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
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
_SOURCES = "runtime/zero/config runtime/zero/offload_config runtime/zero/leaf_module_config runtime/precision_config"
_SOURCES += " comm/config monitor/config compile/config"
# DeepSpeed has a pydantic model for these sections. Keys of other sections are listed below.
MODELS = {
    "zero_optimization": "DeepSpeedZeroConfig",
    "bf16": "DeepSpeedBF16Config",
    "fp16": "DeepSpeedFP16Config",
    "comms_logger": "CommsLoggerConfig",
    "compile": "CompileConfig",
    "tensorboard": "TensorBoardConfig",
    "wandb": "WandbConfig",
    "csv_monitor": "CSVConfig",
    "comet": "CometConfig",
}
_KEYS = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    "optimizer scheduler zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer fp16 bf16 amp "
    "torch_autocast data_types gradient_clipping gradient_predivide_factor prescale_gradients gradient_allreduce_op "
    "communication_data_type seq_parallel_communication_data_type disable_allgather steps_per_print dump_state "
    "wall_clock_breakdown memory_breakdown disable_python_gc activation_checkpointing comms_logger flops_profiler "
    "tensorboard wandb csv_monitor comet aio autotuning data_efficiency hybrid_engine pipeline checkpoint compile "
    "tensor_parallel timers dataloader_drop_last log_level vocabulary_size weight_quantization",
    "optimizer": "type params legacy_fusion",
    "scheduler": "type params",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype",
    "timers": "throughput",
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write",
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    "activation_checkpointing": "partition_activations number_checkpoints contiguous_memory_optimization "
    "synchronize_checkpoint_boundary profile cpu_checkpointing",
}
DONE |= {f"activation_checkpointing.{key}": (False, None) for key in _KEYS["activation_checkpointing"].split()}


def translate(tree: dict[str, Any]) -> None:
    """Rewrite the section of a loaded config in place. Raises `UserError`."""
    given = tree.get("deepspeed")
    if isinstance(given, str):
        tree["deepspeed"] = given = _read(Path(given))
    if not isinstance(given, dict) or not given:
        return
    found = dict(leaves(given))
    for path in found:
        _refuse_unknown(path)
    found = _said({path: value for path, value in found.items() if value != "auto"})
    for path in [path for path in found if path in MOVED]:
        _move(tree, path, found.pop(path))
    for path, value in found.items():
        for section in accumulate(path.split("."), "{}.{}".format):
            if section in REFUSED:
                raise UserError(f"deepspeed.{path}", value, REFUSED[section])
    tree["deepspeed"] = _nested(found)


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
    ours = tree.get(section)
    if ours is None:
        ours = tree[section] = {}
    if not isinstance(ours, dict):
        return  # the schema refuses it
    if ours.setdefault(name, theirs) != theirs:
        raise UserError(f"deepspeed.{path}", value, f"auto, or what {key} says ({ours[name]})")


def _refuse_unknown(path: str) -> None:
    """Raises `UserError` naming the first part of a path that is unknown to DeepSpeed."""
    above = ""
    for part in path.split("."):
        known = known_keys().get(above)
        if known is not None and part not in known:
            meant = difflib.get_close_matches(part, known, n=1) or [
                f"{section}.{part}" for section, keys in known_keys().items() if part in keys
            ]
            hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
            raise UserError(f"deepspeed.{above and above + '.'}{part}", Said(f"DeepSpeed has no such key{hint}"), "")
        above = f"{above}.{part}" if above else part


@cache
def known_keys() -> dict[str, set[str]]:
    """Section -> keys known to the installed DeepSpeed; other sections are not checked.

    They are read from the source of DeepSpeed's config models, because importing them imports torch.
    """
    found = {section: set(keys.split()) for section, keys in _KEYS.items()}
    spec = find_spec("deepspeed")
    root = Path(spec.origin).parent if spec and spec.origin else Path()
    models: dict[str, ast.ClassDef] = {}
    for source in _SOURCES.split():
        file = root / f"{source}.py"
        tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])
        models |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def add(section: str, model: str) -> None:
        fields = [node for node in models[model].body if isinstance(node, ast.AnnAssign)]
        found[section] = {name for field in fields for name in _names(field)}
        for field in fields:
            for name in (n.id for n in ast.walk(field.annotation) if isinstance(n, ast.Name) and n.id in models):
                if name.endswith("Config"):
                    add(f"{section}.{ast.unparse(field.target)}", name)

    for section, model in MODELS.items():
        if model in models:
            add(section, model)
    return found


def _names(field: ast.AnnAssign) -> Iterator[str]:
    """A field's name and its alias."""
    yield ast.unparse(field.target)
    for keyword in field.value.keywords if isinstance(field.value, ast.Call) else ():
        if keyword.arg == "alias" and isinstance(keyword.value, ast.Constant):
            yield str(keyword.value.value)


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in leaves.items():
        *above, last = path.split(".")
        at = found
        for part in above:
            at = at.setdefault(part, {})
        at[last] = value
    return found
