"""Every name of DeepSpeed's that it does not document and `training/zero` uses: an upgrade says which one is gone."""

import ast
import importlib.util
from pathlib import Path

ZERO = Path(__file__).parents[2] / "cqwen_dist" / "training" / "zero"
OWNERS = ("runtime/engine.py", "runtime/zero/stage_1_and_2.py", "runtime/zero/stage3.py")
# What modules of DeepSpeed's set on other objects.
FURTHER = {
    "runtime/zero/partition_parameters.py": ("ds_numel", "ds_shape", "ds_tensor", "partition_numel"),
    "runtime/zero/stage_1_and_2.py": ("_zero_padding",),
    "utils/mixed_precision_linkage.py": ("_hp_mapping",),
    "utils/tensor_fragment.py": ("get_hp_fragment_address", "lp_fragment_address", "start", "numel"),
    "runtime/zero/parameter_offload.py": ("get_param_coordinator",),
    "runtime/zero/partitioned_param_coordinator.py": ("is_invalid_trace", "_invalidate_trace"),
    "ops/__init__.py": ("__compatible_ops__",),
    "runtime/compiler.py": ("compile", "dummy_decorator"),
    "utils/groups.py": ("_WORLD_GROUP",),
}


def defined(path: str) -> set[str]:
    """Functions, fields and attributes that are assigned in a module of DeepSpeed's, and its string constants."""
    found = importlib.util.find_spec("deepspeed")
    assert found is not None
    assert found.submodule_search_locations
    names: set[str] = set()
    source = (Path(found.submodule_search_locations[0]) / path).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


def used() -> set[str]:
    """Whatever training/zero takes from an optimizer or an engine of DeepSpeed's."""
    found = set()
    for path in ZERO.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = getattr(owner, "id", getattr(owner, "attr", ""))
                if name in ("optimizer", "engine") and not node.attr.startswith("register"):  # torch's
                    found.add(node.attr)
    return found


def test_the_installed_deepspeed_has_each_private_name() -> None:
    gone = {path: missing for path, names in FURTHER.items() if (missing := set(names) - defined(path))}
    assert gone == {}
    assert used() - set().union(*map(defined, OWNERS)) == set(), "cqwen_dist/training/zero relies on them"


def test_no_other_module_uses_private_names_of_deepspeeds() -> None:
    names = ("ds_numel", "ds_shape", "ds_tensor", "_hp_mapping", "fp32_partitioned")
    others = [path for path in ZERO.parents[1].rglob("*.py") if ZERO not in path.parents]
    assert not [(p.name, n) for p in others for n in names if n in p.read_text(encoding="utf-8")]
