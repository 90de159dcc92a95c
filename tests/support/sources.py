"""The package's sources as text: names, and which file imports which."""

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "cqwen_dist"
OUTSIDE = ("experiments", "benchmarks")  # folders beside the package: they import it, it never imports them
parsed = cache(ast.parse)  # a source is asked about many times


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a source."""
    return tuple(ast.walk(parsed(source)))


def all_files() -> dict[str, str]:
    """Path below the package -> source."""
    return {
        path.relative_to(ROOT / PACKAGE).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / PACKAGE).rglob("*.py"))
    }


def dotted_name(node: ast.AST) -> str:
    """`a.b` of an expression that is one, or what of it is."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(node: ast.AST, folder: Sequence[str]) -> list[str]:
    """The dotted names that an import, in a file of this folder, may take: modules, or what is in them."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    start = folder[: len(folder) - node.level + 1] if node.level else ()
    parent = [*start, *([node.module] if node.module else [])]
    return [".".join([*parent, alias.name]) for alias in node.names]


def imports_of(name: str, source: str, module_of: dict[str, str]) -> Iterator[str]:
    """The files that a file imports from, wherever in it. A folder is its __init__."""
    folder = (PACKAGE, *Path(name).parts[:-1])
    for node in nodes_of(source):
        for module in imported(node, folder):
            package, _, inner = module.partition(".")
            if isinstance(node, ast.ImportFrom) and inner not in module_of:
                inner = inner.rpartition(".")[0]
            if package == PACKAGE and inner in module_of:
                yield module_of[inner]


def import_graph(files: dict[str, str]) -> dict[str, set[str]]:
    """Each file -> those that it imports. A folder is its __init__."""
    module_of = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in files}
    return {name: set(imports_of(name, source, module_of)) for name, source in files.items()}


def closure(start: str, graph: dict[str, set[str]]) -> set[str]:
    """The files that a file imports, those that they import, and so on; itself among them."""
    found, new = {start}, {start}
    while new:
        new = {name for each in new for name in graph[each]} - found
        found |= new
    return found
