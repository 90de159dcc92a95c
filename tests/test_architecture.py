"""Holds the shape of the house: floors, one home for each concern, and nothing that runs a stranger's code.

Floors (CONTRIBUTING.md): a module imports only from lower floors, and never from another folder of its own floor.
Imports inside functions and under TYPE_CHECKING count: what they hide is a dependency all the same.
`python tests/test_architecture.py` prints how many files and lines the files of `CLOSURES` import.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from radon.complexity import cc_visit
from support.sources import (
    OUTSIDE,
    PACKAGE,
    ROOT,
    all_files,
    closure,
    dotted_name,
    import_graph,
    imported,
    nodes_of,
    parsed,
)

FLOORS = {
    "config": 0,
    "batch": 1,
    "console": 1,
    "ops": 1,
    "sizes": 1,
    "run": 1,
    "wings": 1,
    "parallel": 2,
    "heads": 3,
    "data": 4,
    "generate": 4,  # it drives any model of its Protocol and imports none; the model's own .generate() calls it
    "model": 5,
    "checkpoint": 6,
    "auto": 6,  # what transformers' Auto classes are told: model and tokenizer
    "prediction": 7,
    "training": 8,
    "cluster": 9,
    "api": 10,
    # the wings, which may import all of the core
    "tools/diabetes": 11,
    "tools/plan": 11,
    "tools/export": 11,
    "tools/vllm": 11,
    "tables": 11,
    "tools/site": 12,
    "tools/slurm": 12,  # the memory that the planner counts goes into its requests
    "tools/report": 12,
    "tools/serve": 12,
    "cli": 13,  # the verbs of the core and of both wings
    "__main__": 14,
}
WINGS = ("tools", "tables")  # the core never imports them: `wings.py` names what it takes from them, as text
BY_NAME = {"config/__init__.py", "config/custom.py", "wings.py"}  # files that import modules by names they are given
STATISTICS = ("scipy", "sklearn")  # for the wings alone
# Files that a file imports, directly or not: what its reader may have to read. A tenth more is let pass, so that nobody
# squeezes a change into the limit. `train.py` puts the run together, so it imports nearly all of the core.
CLOSURES = {
    "training/step.py": 50,
    "training/trainer.py": 100,
    "training/train.py": 150,
    "model/causal_lm.py": 70,  # an export, loaded with the package
    "auto.py": 85,  # with its tokenizer
    "cluster/launch.py": 37,
}
OTHER_MODULE = 0  # any further top-level module stands on the ground and imports nothing of ours
LONGEST = {"package": 350, "tests": 499, "function": 80}  # lines, a function's docstring among them
MOST_COMPLEX = 15  # as radon counts: one more than the branches of a function
# Base names that several files have, each with its reason.
SHARED_NAMES = {
    "__init__": "Python's own",
    "numbers": "numbers in a text (data), numbers of a generation (generate): each folder's own subject",
}
SPEAKS = {"cli", "tools/report"}  # who may print
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "joblib", "marshal"}
SOURCES = sorted(path for path in (ROOT / PACKAGE).rglob("*.py"))


def part_of(path: Path) -> str:
    """The folder or top-level module a file belongs to; empty for the package's own __init__."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else part_in(parts)


def part_in(parts: Sequence[str]) -> str:
    """The part of a path or module below the package: a wing's folders are parts of their own."""
    return folder if (folder := "/".join(parts[:2])) in FLOORS else parts[0]


def wing_of(part: str) -> str:
    """The wing that a part belongs to; empty for the core."""
    return first if (first := part.partition("/")[0]) in WINGS else ""


def imported_parts(source: str, path: Path) -> Iterator[tuple[int, str]]:
    """(line, part) of everything of ours that a file imports, wherever in it."""
    folder = (PACKAGE, *path.relative_to(ROOT / PACKAGE).parts[:-1])
    for node in nodes_of(source):
        names = imported(node, folder)
        if isinstance(node, ast.Call) and dotted_name(node.func) in ("importlib.import_module", "import_module"):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        for name in names:
            parts = name.split(".")
            if parts[0] == PACKAGE and len(parts) > 1 and not parts[1].startswith("__version"):
                yield node.lineno, part_in(parts[1:])  # type: ignore[attr-defined]


def floor_faults(path: Path, source: str) -> list[str]:
    """What a file imports that it must not, each with the reason."""
    part = part_of(path)
    if not part:  # it names the api's functions and the model, and imports them on first use (tests/test_api.py)
        cost = "`import cqwen_dist` stays free of cost"
        return [
            f"{path.name}:{line} imports {p}: {cost}" for line, p in _ours(path, source) if p not in ("api", "model")
        ]
    floor, faults = FLOORS.get(part, OTHER_MODULE), []
    for line, other in _ours(path, source):
        place = f"{path.relative_to(ROOT)}:{line} imports {other}"
        theirs = FLOORS.get(other, OTHER_MODULE)
        if wing_of(other) and wing_of(other) != wing_of(part) and part != "cli":
            faults.append(f"{place}: the core and the other wing work without {other}; wings.py names what they take")
        elif part not in FLOORS and other != part:
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
    return sorted(imported_parts(source, path))


def _is_true(keywords: dict[str | None, ast.expr], name: str) -> bool:
    value = keywords.get(name)
    return isinstance(value, ast.Constant) and value.value is True


def habit_faults(path: Path, source: str) -> list[str]:
    """Calls and imports that this project does without, each with the reason."""
    part, found = part_of(path), []
    for node in nodes_of(source):
        reason = ""
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if any(module.split(".")[0] in UNSAFE_MODULES for module in modules):
                reason = "unpickling runs code; use safetensors or JSON"
            statistics = any(module.split(".")[0] in STATISTICS for module in modules)
            if statistics and not wing_of(part):
                reason = "the core trains without scikit-learn and scipy: only the wings compare with other methods"
            if any(module.split(".")[0] in OUTSIDE for module in modules):
                reason = "the package works without its experiments and benchmarks; only they import it"
            types_only = isinstance(node, ast.ImportFrom) and {a.name for a in node.names} <= {"ProcessGroup"}
            ranks = any(m.startswith("torch.distributed") for m in modules) and not types_only
            if ranks and part != "parallel":
                reason = "only parallel/ talks to torch.distributed; a group is passed in and used by its functions"
        elif isinstance(node, ast.Call):
            keywords, called = {k.arg: k.value for k in node.keywords}, dotted_name(node.func)
            if called == "torch.load" and not _is_true(keywords, "weights_only"):
                reason = "torch.load without weights_only=True runs code from the file"
            elif _is_true(keywords, "allow_pickle"):
                reason = "unpickling runs code"
            elif _is_true(keywords, "shell") or called in ("os.system", "os.popen"):
                reason = "a shell reads names as commands; pass a list of arguments"
            elif _is_true(keywords, "trust_remote_code"):
                reason = "only the user's own setting may let a model run its code"
            elif called.endswith("import_module") and not all(isinstance(arg, ast.Constant) for arg in node.args):
                if path.relative_to(ROOT / PACKAGE).as_posix() not in BY_NAME:
                    reason = "which module is imported must be readable here; `wings.py` alone takes from the wings"
            elif called in ("eval", "exec"):
                reason = "text is data here, never code"
            elif called == "print" and part not in SPEAKS:
                reason = "only cli and the report speak; elsewhere use logging, or return the value"
        elif isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if dotted_name(raised) == "NotImplementedError":
                reason = "what is not there is left out, not promised"
        if reason:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {reason}")  # type: ignore[attr-defined]
    words = [n for n, line in enumerate(source.splitlines(), 1) if any(w in line for w in ("TODO", "FIXME", "XXX"))]
    return found + [f"{path.relative_to(ROOT)}:{line}: finish it, or write an issue" for line in words]


def test_imports_go_down_only():
    faults = [fault for path in SOURCES for fault in floor_faults(path, path.read_text(encoding="utf-8"))]
    assert not faults, "\n".join(faults)


def test_no_unsafe_unfinished_or_printing_code():
    faults = [fault for path in SOURCES for fault in habit_faults(path, path.read_text(encoding="utf-8"))]
    assert not faults, "\n".join(faults)


def long_files(files: dict[str, str], limit: int) -> Iterator[str]:
    """Those of the files (name -> source) with more lines."""
    return (f"{name}: too long ({n})" for name, source in files.items() if (n := len(source.splitlines())) > limit)


def long_functions(name: str, source: str) -> Iterator[str]:
    """Of a Triton kernel the lines behind its parameters count: it cannot take them in an object."""
    for node in nodes_of(source):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            of_triton = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            lines = (node.end_lineno or 0) - (node.body[0].lineno if of_triton else node.lineno) + 1
            if lines > LONGEST["function"]:
                yield f"{name} {node.name}: too long ({lines})"


def complex_functions(name: str, source: str) -> Iterator[str]:
    for block in cc_visit(source):
        if hasattr(block, "is_method") and block.complexity > MOST_COMPLEX:  # a function or method, not a class
            yield f"{name} {block.name}: too complex ({block.complexity})"


def repeated_names(files: dict[str, str]) -> Iterator[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for name in files:
        places[Path(name).stem].append(name)
    yield from (f"file {stem}: {', '.join(own)}" for stem, own in places.items() if len(own) > 1)


def repeated_classes(files: dict[str, str]) -> Iterator[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for name, source in files.items():
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    yield from (f"class {name}: {', '.join(own)}" for name, own in places.items() if len(own) > 1)


def circles(files: dict[str, str]) -> Iterator[str]:
    """Groups of files that import each other, by whatever way round. Names are paths below the package."""
    reached = {name: own - {name} for name, own in import_graph(files).items()}
    for middle in files:
        for own in reached.values():
            if middle in own:
                own |= reached[middle]
    told: set[str] = set()
    for name in files:
        if name in reached[name] and name not in told:
            circle = sorted(other for other in reached[name] if name in reached[other])
            told.update(circle)
            yield f"circle {', '.join(circle)}"


def faults() -> dict[str, str]:
    """What breaks a rule -> why it is one."""
    files = all_files()
    found: dict[str, str] = {}
    beside = [path for folder in OUTSIDE for path in (ROOT / folder).rglob("*.py")]
    tried = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in beside}
    for name, source in {**files, **tried}.items():
        for fault in complex_functions(name, source):
            found[fault] = (
                f"more than {MOST_COMPLEX} paths are not held in the head: split it by meaning, or use a table"
            )
        for fault in long_functions(name, source):
            found[fault] = f"more than {LONGEST['function']} lines do not fit a screen: give its phases names"
    for fault in long_files({**files, **tried}, LONGEST["package"]):
        found[fault] = "a file of so many lines has two subjects: split it"
    for fault in repeated_names(files):
        if fault.partition(":")[0].removeprefix("file ") not in SHARED_NAMES:
            found[fault] = "two files of one name are taken for each other: rename one (or give SHARED_NAMES a reason)"
    for fault in repeated_classes(files):
        found[fault] = "two classes of one name are taken for each other: rename one"
    for fault in circles(files):
        found[fault] = "files in a circle can only be read together: pass a value, or move what both need below"
    return found


def test_limits_of_size_names_and_import_circles():
    found = faults()
    assert not found, "\n".join(f"{fault}: {why}" for fault, why in found.items())


def test_test_files_stay_short():
    files = {p.relative_to(ROOT).as_posix(): p.read_text("utf-8") for p in (ROOT / "tests").rglob("*.py")}
    long = list(long_files(files, LONGEST["tests"]))
    assert not long, f"a file of so many lines has two subjects: split it ({long})"


def test_pages_name_files_that_exist():
    """A file moves more often than a page is read."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    missing = [
        f"{page.name}: {found}"
        for page in pages
        for found in re.findall(r"(?:[\w.]+/)+\w+\.py\b", page.read_text(encoding="utf-8"))
        if not any((root / found).is_file() for root in (ROOT, ROOT / PACKAGE))
    ]
    assert not missing, "\n".join(missing)


def test_no_module_is_called_utils():
    drawers = [str(p) for p in SOURCES if {"utils", "util", "helpers", "common", "misc"} & {*p.parts, p.stem}]
    assert not drawers, f"a module is named after what it knows; `utils` knows everything ({drawers})"


def closure_sizes() -> dict[str, tuple[int, int]]:
    """(files, lines) of the closure of each file of `CLOSURES`."""
    files = all_files()
    graph = import_graph(files)
    closures = {start: closure(start, graph) for start in CLOSURES}
    return {start: (len(names), sum(len(files[n].splitlines()) for n in names)) for start, names in closures.items()}


def test_closures_stay_small():
    """Files only: lines are printed (see above) and no test counts them, or statements would be squeezed."""
    faults = [
        f"{start} imports {files} files, {CLOSURES[start]} are wanted: pass a value, or move what it needs below"
        for start, (files, _) in closure_sizes().items()
        if files > 1.1 * CLOSURES[start]
    ]
    assert not faults, "\n".join(faults)


if __name__ == "__main__":
    for start, (count, lines) in closure_sizes().items():
        print(f"{start}: {count} files, {lines:,} lines")


def never_set(files: dict[str, str], users: Iterable[str]) -> Iterator[str]:
    """Fields with a default that nobody gives another value: options that no longer choose anything.

    files: name -> source, in which the named tuples and dataclasses are. users: all sources that may make one.
    """
    classes = {
        node.name: (name, node)
        for name, source in files.items()
        for node in nodes_of(source)
        if isinstance(node, ast.ClassDef)
    }
    fields = {name: _fields(node, classes) for name, (_, node) in classes.items() if _is_record(node)}
    given: set[tuple[str, str]] = set()  # (class, field); class "" for any class
    for source in users:
        for node, inside in _with_class(parsed(source)):
            if isinstance(node, ast.Call):
                called = dotted_name(node.func).rpartition(".")[2]
                # `partial(Class, ...)`; a class method's own class
                called = dotted_name(node.args[0]) if called == "partial" and node.args else called
                called = inside if called == "cls" and inside in fields else called
                names = list(fields.get(called, ()))
                every = any(isinstance(arg, ast.Starred) for arg in node.args) or any(
                    k.arg is None for k in node.keywords
                )
                given.update((called, name) for name in (names if every else names[: len(node.args)]))
                any_class = called in ("cls", "kind", "replace", "_replace")  # a class, or a copy, of any kind
                given.update(("" if any_class else called, k.arg) for k in node.keywords if k.arg)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                given.add(("", node.attr))
    for name, defaults in fields.items():
        heirs = [heir for heir, (_, node) in classes.items() if name in map(dotted_name, node.bases)]
        for field, default in defaults.items():
            if default and not given & {("", field), *((each, field) for each in (name, *heirs))}:
                yield f"{classes[name][0]} {name}.{field}"


def _with_class(tree: ast.AST, inside: str = "") -> Iterator[tuple[ast.AST, str]]:
    """All nodes, each with the name of the class that it is in."""
    for node in ast.iter_child_nodes(tree):
        yield node, inside
        yield from _with_class(node, node.name if isinstance(node, ast.ClassDef) else inside)


def _is_record(node: ast.ClassDef) -> bool:
    decorators = [dotted_name(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
    return "NamedTuple" in map(dotted_name, node.bases) or "dataclass" in decorators


def _fields(node: ast.ClassDef, classes: dict[str, tuple[str, ast.ClassDef]]) -> dict[str, bool]:
    """A class's fields in order, inherited ones first: whether each has a default that an argument may replace."""
    found: dict[str, bool] = {}
    for base in map(dotted_name, node.bases):
        found |= _fields(classes[base][1], classes) if base in classes and base != node.name else {}
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and "ClassVar" not in ast.dump(line):
            # field(init=False) takes no argument; what field(default_factory=...) makes is filled, not given; a verb's
            # option is given on the command line
            keywords = {k.arg for k in line.value.keywords} if isinstance(line.value, ast.Call) else set()
            elsewhere = {"init", "default_factory"} & keywords or "typer.Option" in ast.unparse(line.annotation)
            found[line.target.id] = line.value is not None and not elsewhere
    return found


def test_every_option_is_used():
    files = all_files()
    others = [p.read_text("utf-8") for folder in ("tests", *OUTSIDE) for p in (ROOT / folder).rglob("*.py")]
    faults = list(never_set(files, [*files.values(), *others]))
    assert not faults, f"nobody gives these fields a value: make each a constant, or delete it ({faults})"
