"""Every name of DeepSpeed's that it does not document and `training/zero` uses: an upgrade says which one is gone."""

from __future__ import annotations

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path

import deepspeed
import pytest
import torch.distributed as dist

from cqwen_dist.parallel.runtime import distributed
from cqwen_dist.training.zero.patches import join_deepspeed

ZERO = Path(__file__).parents[2] / "cqwen_dist" / "training" / "zero"
ZERO_1_2 = "runtime/zero/stage_1_and_2.py:DeepSpeedZeroOptimizer"
ZERO_3 = "runtime/zero/stage3.py:DeepSpeedZeroOptimizer_Stage3"
ENGINE = "runtime/engine.py:DeepSpeedEngine"
MUON = "deepspeed.runtime.zero.muon.original_muon"
BOTH = ("optimizer", "dp_process_group", "get_grad_norm_direct", "loss_scale", "cpu_offload", "param_groups")
# By where a name is defined: in a class, its methods and attributes; in a module, what it sets on any object.
NAMES = {
    ZERO_1_2: (
        *BOTH,
        *("single_partition_of_fp32_groups", "bit16_groups", "averaged_gradients", "all_grad_tensors"),
        *("reset_cpu_buffers", "overflow", "flatten", "reduce_bucket_size", "_grad_acc_hooks"),
        *("partition_gradients", "dtype"),
        *("parallel_partitioned_bit16_groups", "round_robin_bit16_groups", "bit16_groups_flat"),
        *("scaled_global_norm", "reduce_gradients", "overlapping_partition_gradients_reduce_epilogue"),  # replaced
    ),
    ZERO_3: (
        *(name for name in BOTH if name != "cpu_offload"),
        *("fp32_partitioned_groups_flat", "sub_group_to_group_id", "fp16_groups", "_overflow_clean_up"),
        *("parameter_offload", "_get_norm_groups"),
    ),
    ENGINE: ("optimizer", "global_rank", "device", "was_step_applied", "set_gradient_accumulation_boundary"),
    "runtime/zero/partition_parameters.py": ("ds_numel", "ds_shape", "ds_tensor", "partition_numel"),
    "runtime/zero/stage_1_and_2.py": ("_zero_padding",),
    "utils/mixed_precision_linkage.py": ("_hp_mapping",),
    "utils/tensor_fragment.py:tensor_fragment": ("get_hp_fragment_address", "lp_fragment_address"),
    "utils/tensor_fragment.py:fragment_address": ("start", "numel"),
    "runtime/zero/parameter_offload.py:DeepSpeedZeRoOffload": ("get_param_coordinator",),
    "runtime/zero/partitioned_param_coordinator.py:PartitionedParameterCoordinator": (
        *("is_invalid_trace", "_invalidate_trace"),
    ),
    "ops/__init__.py": ("__compatible_ops__",),
    "runtime/compiler.py": ("compile", "dummy_decorator"),
    "utils/groups.py": ("_WORLD_GROUP",),
}


@cache
def source(path: str) -> ast.Module:
    found = importlib.util.find_spec("deepspeed")
    assert found is not None
    assert found.submodule_search_locations
    return ast.parse((Path(found.submodule_search_locations[0]) / path).read_text(encoding="utf-8"))


def defined(where: str) -> set[str]:
    """Functions, fields and attributes that are assigned, of a class or a module; string constants of a module."""
    path, _, name = where.partition(":")
    tree: ast.AST = source(path)
    if name:
        tree = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Assign):  # a property
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif not name and isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


@pytest.mark.parametrize(("where", "name"), [(where, name) for where, names in NAMES.items() for name in names])
def test_the_installed_deepspeed_has_each_private_name(where: str, name: str) -> None:
    assert name in defined(where), f"deepspeed/{where} has no {name} any more; cqwen_dist/training/zero relies on it"


def test_the_list_of_private_names_is_complete() -> None:
    """Whatever training/zero takes from an optimizer or an engine of DeepSpeed's is in the list."""
    documented = {"backward", "step", "train", "module", "zero_grad", "state"}
    known = documented | {name for names in NAMES.values() for name in names}
    used = set()
    for path in ZERO.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute):
                continue
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name in ("optimizer", "engine") and not (
                isinstance(owner, ast.Name) and node.attr.startswith("register")
            ):
                used.add(node.attr)
    assert used <= known, f"not in the list: {sorted(used - known)}"
    elsewhere = ("ds_numel", "ds_shape", "ds_tensor", "_hp_mapping", "fp32_partitioned")
    others = [path for path in ZERO.parents[1].rglob("*.py") if ZERO not in path.parents]
    assert not [(p.name, n) for p in others for n in elsewhere if n in p.read_text(encoding="utf-8")]


def test_an_ended_process_group_in_deepspeeds_cache_is_dropped() -> None:
    for _ in range(2):
        with distributed(alone=True):
            join_deepspeed()
            group = deepspeed.utils.groups._clone_world_group()
            join_deepspeed()
            assert deepspeed.utils.groups._clone_world_group() is group
            assert dist.get_global_rank(group, 0) == 0


def test_joining_deepspeed_does_not_compile_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch.compile around it, its import brings inductor: a second of every start, for an optimizer unused."""
    monkeypatch.delitem(sys.modules, MUON, raising=False)
    compiler = deepspeed.runtime.compiler.compile
    with distributed(alone=True):
        join_deepspeed()
    plain = sys.modules[MUON].muon_update  # type: ignore[attr-defined]
    assert not hasattr(plain, "_torchdynamo_orig_callable")
    assert deepspeed.runtime.compiler.compile is compiler


def test_joining_deepspeed_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would try with a C compiler which of its own operations it could build: half a second of every start."""
    monkeypatch.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)
    monkeypatch.setattr(deepspeed.ops, "_probe_compatible_ops", lambda: pytest.fail("it looks for compilers"))
    with distributed(alone=True):
        join_deepspeed()
    assert deepspeed.ops.__compatible_ops__ == {"deepspeed_shm_comm": False}
