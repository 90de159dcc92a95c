"""No option without a choice: a field with a default is given another value somewhere."""

import ast
from collections.abc import Iterable, Iterator

from support.sources import OUTSIDE, ROOT, all_files, dotted_name, nodes_of, parsed


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
