"""The test files that a change can break: `python tests/support/changed.py [BASE]` prints them (`make test-changed`).

A test file depends on what it imports, directly or not, on the helpers and fixtures that it names, and on the files of
other kinds that are named on this way. A helper that starts `cqwen` depends on the whole package. Changes are those
since BASE (default: main), uncommitted ones included.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("cqwen_dist", "experiments", "benchmarks", "tests")
FOR_ALL = ("pyproject.toml", "Makefile", "tests/conftest.py")  # a change of one of these can break any test
ALWAYS = ("tests/test_architecture.py",)  # it reads all sources as text
COMMAND = "cqwen_dist/__main__.py"


def affected(changed: Iterable[str], files: Mapping[str, str]) -> list[str]:
    """The test files to run, sorted. changed: paths below the root; files: path -> source of all Python files."""
    changed = set(changed)
    tests = {name for name in files if re.search(r"(^|/)test_\w+\.py$", name)}
    if changed & {*FOR_ALL}:
        return sorted(tests)
    trees = {name: ast.parse(text) for name, text in files.items()}
    for path in changed - files.keys():  # of another kind: what names it, by its path or by its name alone
        changed |= {name for name, tree in trees.items() if {path, path.rpartition("/")[2]} & {*_strings(tree)}}
    helpers = {name for name in files if name.startswith("tests/support/") or name.endswith("conftest.py")}
    needs = {name: _needs(tree, name, files, inside=name not in helpers) for name, tree in trees.items()}
    named = _needs_of_definitions({name: trees[name] for name in helpers}, files)
    for name in tests:
        words = _names(trees[name])
        needs[name] = needs[name].union(*(needed for definition, needed in named.items() if definition in words))
    while grown := {name for name in files.keys() - changed if needs[name] & changed}:
        changed |= grown
    return sorted(tests & (changed | {*ALWAYS}))


def _needs_of_definitions(helpers: Mapping[str, ast.Module], files: Mapping[str, str]) -> dict[str, set[str]]:
    """What the body of each function or class of the helpers needs, by its name, through other helpers too."""
    found: dict[str, set[str]] = {}
    words: dict[str, set[str]] = {}
    for name, tree in helpers.items():
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found[node.name] = found.get(node.name, set()) | _needs(node, name, files)
                words[node.name] = words.get(node.name, set()) | _names(node)
    for _ in range(4):  # helpers that call helpers
        for name in found:
            found[name] = found[name].union(*(found[other] for other in words[name] & found.keys()))
    return found


def _needs(tree: ast.AST, name: str, files: Mapping[str, str], inside: bool = True) -> set[str]:
    """The files that a file or a part of one imports or names. inside: in the bodies of functions too, and by name."""
    found: set[str] = set()
    for node in _walk(tree, inside):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folder = name.split("/")[:-1]
            here = folder[: len(folder) - node.level + 1] if node.level else []
            parent = ".".join([*here, *([node.module] if node.module else [])])
            modules = [parent, *(f"{parent}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "from_wing" and node.args:
            begin = next(_strings(node.args[0]), "")  # of an f-string; "" for a variable, which may be any
            modules = [f"cqwen_dist.{place}" for key, place in _places(files) if key.startswith(begin)]
        elif isinstance(node, ast.List):
            found |= {COMMAND} if {"-m", "cqwen_dist"} <= {*_strings(node)} else set()
        elif inside and isinstance(node, ast.Constant) and str(node.value).startswith("cqwen_dist."):
            modules = [str(node.value)]
        for path in (module.replace(".", "/") for module in modules):
            for start in ("", "tests/", f"{name.rpartition('/')[0]}/"):
                found |= {own for own in (f"{start}{path}.py", f"{start}{path}/__init__.py") if own in files}
    return found - {name}


def _walk(tree: ast.AST, inside: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if inside or not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.If)):
            yield node
            yield from _walk(node, inside)


def _names(tree: ast.AST) -> set[str]:
    """Names of helpers that are imported or called, and of fixtures."""
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return named | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def _strings(tree: ast.AST) -> Iterator[str]:
    return (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def _places(files: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, module) of all that the core takes from the wings; the verbs without their names."""
    text = files.get("cqwen_dist/wings.py", "")
    return [*re.findall(r'"([^"]*)": "([\w.]+):', text), *(("", each) for each in re.findall(r': f"([\w.]+):', text))]


def changed_since(base: str) -> list[str]:
    """Paths that differ from where the branch left `base`, and files that git does not know yet."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()

    (start,) = git("merge-base", base, "HEAD")
    return [*git("diff", "--name-only", "--no-renames", start), *git("ls-files", "--others", "--exclude-standard")]


def main() -> None:
    changed = changed_since(sys.argv[1] if len(sys.argv) > 1 else "main")
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    files = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    print(*affected(changed, files) if changed else (), sep="\n")


if __name__ == "__main__":
    main()
