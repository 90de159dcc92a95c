"""Holds the shape of the house: floors, one home for each concern, and nothing that runs a stranger's code.

Floors (CONTRIBUTING.md): a module imports only from lower floors, and never from another folder of its own floor.
Imports inside functions and under TYPE_CHECKING count: what they hide is a dependency all the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "cqwen_dist"
FLOORS = {
    "config": 0,
    "batch": 1,
    "ops": 1,
    "plan": 1,
    "run": 1,
    "parallel": 2,
    "generate": 2,  # it drives any model of its Protocol and imports none; the model's own .generate() calls it
    "data": 3,
    "model": 3,
    "checkpoint": 4,
    "auto": 4,  # what transformers' Auto classes are told: model and tokenizer
    "train": 5,
    "cluster": 6,
    "bench": 6,
    "report": 6,
    "cli": 7,
    "__main__": 8,
}
OTHER_MODULE = 0  # any further top-level module stands on the ground and imports nothing of ours
LONGEST = 500
SPEAKS = {"cli", "report", "bench"}  # who may print
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "joblib", "marshal"}
SOURCES = sorted(path for path in (ROOT / PACKAGE).rglob("*.py"))


def part_of(path: Path) -> str:
    """The folder or top-level module a file belongs to; empty for the package's own __init__."""
    first = path.relative_to(ROOT / PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imported_parts(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """(line, part) of everything of ours that a file imports, wherever in it."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = (PACKAGE, *path.relative_to(ROOT / PACKAGE).parts[:-1])
            start = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            module = ".".join(name for name in (start, node.module) if name)
            names = [f"{module}.{alias.name}" for alias in node.names] if module == PACKAGE else [module]
        elif isinstance(node, ast.Call) and _name(node.func) in ("importlib.import_module", "import_module"):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        for name in names:
            parts = name.split(".")
            if parts[0] == PACKAGE and len(parts) > 1 and not parts[1].startswith("__version"):
                yield node.lineno, parts[1]  # type: ignore[attr-defined]


def floor_faults(path: Path, source: str) -> list[str]:
    """What a file imports that it must not, each with the reason."""
    part = part_of(path)
    if not part:
        return [
            f"{path.name}:{line} imports {p}: `import cqwen_dist` stays free of cost" for line, p in _ours(path, source)
        ]
    floor, faults = FLOORS.get(part, OTHER_MODULE), []
    for line, other in _ours(path, source):
        place = f"{path.relative_to(ROOT)}:{line} imports {other}"
        theirs = FLOORS.get(other, OTHER_MODULE)
        if part not in FLOORS and other != part:
            faults.append(f"{place}: {part} is no known floor, so it stands on the ground and imports nothing of ours")
        elif other != part and theirs > floor:
            faults.append(
                f"{place}: floor {theirs} is above {part}'s floor {floor}; imports go down only, pass a value"
            )
        elif other != part and theirs == floor:
            faults.append(f"{place}: both stand on floor {floor}; what two folders share belongs on a floor below")
        elif part == "ops" and other == "config":
            faults.append(f"{place}: ops is pure tensor maths; give it values, not the run's settings")
    return faults


def _ours(path: Path, source: str) -> list[tuple[int, str]]:
    return sorted(imported_parts(ast.parse(source), path))


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_true(keywords: dict[str | None, ast.expr], name: str) -> bool:
    value = keywords.get(name)
    return isinstance(value, ast.Constant) and value.value is True


def habit_faults(path: Path, source: str) -> list[str]:
    """Calls and imports that this project does without, each with the reason."""
    part, found = part_of(path), []
    for node in ast.walk(ast.parse(source)):
        reason = ""
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if any(module.split(".")[0] in UNSAFE_MODULES for module in modules):
                reason = "unpickling runs code; use safetensors or JSON"
            types_only = isinstance(node, ast.ImportFrom) and {a.name for a in node.names} <= {"ProcessGroup"}
            if part != "parallel" and any(m.startswith("torch.distributed") for m in modules) and not types_only:
                reason = "only parallel/ talks to torch.distributed; a group is passed in and used by its functions"
        elif isinstance(node, ast.Call):
            keywords, called = {k.arg: k.value for k in node.keywords}, _name(node.func)
            if called == "torch.load" and not _is_true(keywords, "weights_only"):
                reason = "torch.load without weights_only=True runs code from the file"
            elif _is_true(keywords, "allow_pickle"):
                reason = "unpickling runs code"
            elif _is_true(keywords, "shell") or called in ("os.system", "os.popen"):
                reason = "a shell reads names as commands; pass a list of arguments"
            elif _is_true(keywords, "trust_remote_code"):
                reason = "only the user's own setting may let a model run its code"
            elif called in ("eval", "exec"):
                reason = "text is data here, never code"
            elif called == "print" and part not in SPEAKS:
                reason = "only cli, report and bench speak; elsewhere use logging, or return the value"
        elif isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if _name(raised) == "NotImplementedError":
                reason = "what is not there is left out, not promised"
        if reason:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {reason}")  # type: ignore[attr-defined]
    words = [n for n, line in enumerate(source.splitlines(), 1) if any(w in line for w in ("TODO", "FIXME", "XXX"))]
    return found + [f"{path.relative_to(ROOT)}:{line}: finish it, or write an issue" for line in words]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / PACKAGE)))
def test_imports_go_down_only(path):
    faults = floor_faults(path, path.read_text(encoding="utf-8"))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / PACKAGE)))
def test_nothing_unsafe_unfinished_or_noisy(path):
    faults = habit_faults(path, path.read_text(encoding="utf-8"))
    assert not faults, "\n".join(faults)


def module_imports() -> dict[str, set[str]]:
    """Every module of ours and which modules it imports, wherever in it; `from package import module`: that module."""
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in SOURCES}
    found: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                asked = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= {full if full in names else node.module for full in asked}
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
    return found


def test_no_modules_import_each_other_in_a_circle():
    imports = module_imports()
    while True:  # drop what imports none of the rest, and what none of the rest imports
        ends = {name for name, seen in imports.items() if not seen & imports.keys()}
        ends |= imports.keys() - set().union(*imports.values())
        if not ends:
            break
        imports = {name: seen for name, seen in imports.items() if name not in ends}
    assert not imports, f"split what they share into a module below both ({sorted(imports)})"


def test_files_stay_short():
    files = [*SOURCES, *(ROOT / "tests").rglob("*.py")]
    long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text("utf-8").splitlines())) >= LONGEST}
    assert not long, f"a file of {LONGEST} lines or more has two subjects: split it ({long})"


def test_there_is_no_drawer():
    drawers = [str(p) for p in SOURCES if {"utils", "util", "helpers", "common", "misc"} & {*p.parts, p.stem}]
    assert not drawers, f"a module is named after what it knows; `utils` knows everything ({drawers})"


CASES = [
    ("ops/a.py", "from cqwen_dist.parallel.groups import Groups", "floor 2 is above"),
    ("ops/a.py", "def f():\n    import cqwen_dist.model", "floor 3 is above"),
    ("ops/a.py", "from cqwen_dist import config", "pure tensor maths"),
    ("ops/a.py", "from ..plan import memory", "both stand on floor 1"),
    ("data/a.py", "from cqwen_dist.model import x", "both stand on floor 3"),
    ("data/a.py", "import importlib\nimportlib.import_module('cqwen_dist.cli')", "floor 7 is above"),
    ("targets.py", "from cqwen_dist.config import x", "stands on the ground"),
    ("__init__.py", "from cqwen_dist.config import x", "free of cost"),
    ("train/a.py", "from cqwen_dist.model import x\nfrom .b import y\nimport cqwen_dist.config", ""),
    ("cli/runs.py", "from cqwen_dist.bench import x", ""),
    ("__main__.py", "from cqwen_dist.cli import main", ""),
]


@pytest.mark.parametrize(("name", "source", "reason"), CASES)
def test_the_floor_check_sees_it(name, source, reason):
    faults = floor_faults(ROOT / PACKAGE / name, source)
    assert (reason in faults[0]) if reason else not faults


HABITS = [
    "import pickle",
    "from pickle import loads",
    "import torch.distributed as dist",
    "torch.load(path)",
    "torch.load(path, weights_only=False)",
    "np.load(path, allow_pickle=True)",
    "subprocess.run(text, shell=True)",
    "f(trust_remote_code=True)",
    "print(1)",
    "eval(text)",
    "raise NotImplementedError",
    "raise NotImplementedError('later')",
    "x = 1  # " + "TODO",
]


@pytest.mark.parametrize("source", HABITS)
def test_the_habit_check_sees_it(source):
    assert habit_faults(ROOT / PACKAGE / "train/a.py", source)


def test_the_habit_check_lets_the_rest_pass():
    fine = "from torch.distributed import ProcessGroup\nmodel.eval()\ntorch.load(p, weights_only=True)\nlog.info('x')"
    assert not habit_faults(ROOT / PACKAGE / "train/a.py", fine)
    assert not habit_faults(ROOT / PACKAGE / "parallel/a.py", "import torch.distributed as dist")
    assert not habit_faults(ROOT / PACKAGE / "cli/runs.py", "print(1)")
