"""Code in an exported folder, so that it loads without this package (trust_remote_code=True).

The files are generated from the package's modules: every definition that the classes in `FILES` need is copied
unchanged. A name with two meanings in one file is an error.
"""

import ast
import builtins
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cqwen_dist.config import LoraConfig, NumberPolicy

Name = tuple[str, str]  # one of our modules, and a name that it defines
Meaning = Name | str  # our definition, or an import statement for an external package
Reached = Mapping[Name, Mapping[str, Meaning]]  # definition -> (name in it -> meaning)

CONFIGURATION, MODELING = "configuration_causal_qwen", "modeling_causal_qwen"
TOKENIZATION = "tokenization_causal_qwen"
# The files and their classes. Definitions shared by two files go into the first.
FILES: dict[str, list[Name]] = {
    CONFIGURATION: [("cqwen_dist.model.configuration", "CausalQwenConfig")],
    MODELING: [
        ("cqwen_dist.model.causal_lm", "CausalQwenForCausalLM"),
        ("cqwen_dist.model.features_face", "CausalQwenFeatures"),
        ("cqwen_dist.generate.pipeline", "CausalQwenTextGeneration"),
        ("cqwen_dist.generate.pipeline", "register_pipeline"),
    ],
    TOKENIZATION: [("cqwen_dist.data.auto_tokenizer", "CausalQwenTokenizer")],
}
# The copy's loss is the one in plain torch: the package's brings ranks and kernels.
INSTEAD = {("cqwen_dist.heads.fused_loss", "mean_loss"): ("cqwen_dist.tools.export.plain_loss", "mean_loss")}
# Functions that only this package's runs use; the copies only raise. Names without a class match methods of any class.
RUNS = {
    *("inherit", "centre", "start", "score_targets", "start_scores", "sharpened", "measure", "metrics"),
    "CausalQwenForCausalLM.from_base",
    "CausalQwenModel._of_base",
    "CausalQwenModel.from_base_model",
    "CausalModules.kept_features",
    "CausalModules.with_beside",
    "WidePart.begin",
    "from_wing",
}
ADAPTERS = {"inject_lora", "merge_lora"}  # without adapters these raise too, so the code does not need peft
# Pydantic config models, written as dataclasses.
SECTIONS: dict[str, type[BaseModel]] = {"NumberPolicy": NumberPolicy, "LoraConfig": LoraConfig}
WIDTH = 120
ROOT = Path(__file__).parents[3]  # contains `cqwen_dist`
HEAD = "# Written by `cqwen export` out of the modules of cqwen_dist that are named below (Apache License 2.0)."


def write_code(folder: str | Path, adapters: bool | None = None, beside: object = None) -> dict[str, Any]:
    """Write a model's code into its folder; returns `auto_map` for its config.

    adapters: whether the model has any; the code then imports peft. None: the folder of a tokenizer. It only gets code
    if it has none, since a model's files there share definitions with the tokenizer's. beside: its side network
    (`heads.beside`), or None; the code of its class goes along.
    """
    folder, kind = Path(folder), type(beside)
    folder.mkdir(parents=True, exist_ok=True)
    more = () if beside is None else ((kind.__module__, kind.__name__),)
    whole = adapters is not None or not (folder / f"{TOKENIZATION}.py").is_file()
    for name, text in portable_files(bool(adapters), more).items() if whole else ():
        if adapters is not None or name != MODELING:
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
    if adapters is None:
        return {"AutoTokenizer": [None, f"{TOKENIZATION}.CausalQwenTokenizer"]}
    return {
        "AutoConfig": f"{CONFIGURATION}.CausalQwenConfig",
        "AutoModel": f"{MODELING}.CausalQwenFeatures",
        "AutoModelForCausalLM": f"{MODELING}.CausalQwenForCausalLM",
    }


@cache
def portable_files(adapters: bool, more: tuple[Name, ...] = ()) -> dict[str, str]:
    """File name without .py -> text. Raises ValueError for a name that would change its meaning.

    more: further classes of the model's file.
    """
    absent = RUNS if adapters else RUNS | ADAPTERS
    files = {**FILES, MODELING: [*FILES[MODELING], *more]}
    reached = {file: _reached(roots, absent) for file, roots in files.items()}
    each = [at for found in reached.values() for at in found]
    # Definitions used by two files, with everything they need, go into the first file; the others import them.
    shared = _reached([*reached[CONFIGURATION], *(at for at in each if each.count(at) > 1)], absent)
    texts = {file: _text(found, shared, absent) for file, found in reached.items() if file != CONFIGURATION}
    texts[MODELING] += "\n\nregister_pipeline()  # pipeline(model=object) has no folder to find its class in\n"
    return {CONFIGURATION: _text(shared, {}, absent), **texts}


@dataclass
class _Module:
    """A module's top-level definitions as source, and its imports."""

    doc: str = ""
    nodes: dict[str, ast.stmt] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # with the comments above each
    imports: dict[str, Meaning] = field(default_factory=dict)


@cache
def _module(name: str) -> _Module:
    path = ROOT / name.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    tree, lines, last = ast.parse(source), source.splitlines(), 0
    found = _Module(ast.get_docstring(tree) or "")
    if path.is_dir():  # packages import lazy names under TYPE_CHECKING
        tree.body += [node for part in tree.body if isinstance(part, ast.If) for node in part.body]
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            _note_import(found, node)
        for defined in _defined(node):
            found.nodes[defined] = node
            found.texts[defined] = "\n".join(lines[last : node.end_lineno]).strip("\n")
        last = node.end_lineno or last
    return found


def _note_import(module: _Module, node: ast.Import | ast.ImportFrom) -> None:
    for alias in node.names:
        local = alias.asname or alias.name
        if isinstance(node, ast.Import):
            module.imports[local.split(".")[0]] = ast.unparse(ast.Import([alias]))
        elif str(node.module).startswith("cqwen_dist"):
            module.imports[local] = (str(node.module), alias.name)
        else:
            module.imports[local] = ast.unparse(ast.ImportFrom(node.module, [alias], 0))


def _meaning(module: str, name: str) -> Meaning | None:
    """Meaning of a name in a module; None if it is neither defined nor imported there."""
    if name in _module(module).nodes:
        return module, name
    found = _module(module).imports.get(name)
    if isinstance(found, tuple):
        found = INSTEAD.get(found, found)
        return _meaning(*found) or found  # a package's __init__ may re-export it
    return found


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)]


def _absent(node: ast.stmt, absent: set[str]) -> list[ast.stmt]:
    """Functions in `absent`: a class's methods, or the definition."""
    if isinstance(node, ast.ClassDef):
        names = [getattr(part, "name", "") for part in node.body]
        return [part for part, name in zip(node.body, names, strict=True) if {name, f"{node.name}.{name}"} & absent]
    return [node] if isinstance(node, ast.FunctionDef) and node.name in absent else []


def _reached(roots: Iterable[Name], absent: set[str]) -> dict[Name, dict[str, Meaning]]:
    """Definitions that the roots need, with the meanings of their names. Raises ValueError for an imported module."""
    found: dict[Name, dict[str, Meaning]] = {}
    waiting = list(roots)
    while waiting:
        if (at := waiting.pop()) not in found:
            found[at] = _names_in(*at, absent)
            waiting += [where for where in found[at].values() if isinstance(where, tuple)]
    return found


def _names_in(module: str, name: str, absent: set[str]) -> dict[str, Meaning]:
    if name in SECTIONS:
        text = _section(SECTIONS[name])
        return {n: f"from dataclasses import {n}" for n in ("asdict", "dataclass", "field") if f"{n}(" in text}
    if name not in _module(module).nodes:
        raise ValueError(f"{module} defines no {name}: import names from a module, not the module")
    node = _module(module).nodes[name]
    gone = {id(part) for function in _absent(node, absent) for part in ast.walk(function)}
    used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and id(part) not in gone}
    meant = {each: _meaning(module, each) for each in sorted(used)}
    return {each: where for each, where in meant.items() if where is not None}


def _text(reached: Reached, shared: Reached, absent: set[str]) -> str:
    """Text of one file: imports, then definitions; each module follows the modules that it imports."""
    own = {at: names for at, names in reached.items() if at not in shared}
    imports = []
    for name, where in _one_meaning(own).items():
        if isinstance(where, str):
            imports.append(where)
        elif where in shared:
            imports.append(f"from .{CONFIGURATION} import {name}")
    text = "\n".join([HEAD, "", "from __future__ import annotations", "", *sorted(imports)])
    for module in _in_order(own):
        source = _module(module)
        names = [name for name in source.nodes if (module, name) in own]
        doc = source.doc if 2 * len(names) >= len(source.nodes) else source.doc.partition("\n")[0]
        lines = [f"---- {module.replace('.', '/')}.py", *doc.splitlines()]
        text += "\n\n\n" + "\n".join(f"# {line}".rstrip() for line in lines)
        for part in dict.fromkeys(_definition(module, name, absent) for name in names):
            text += ("\n\n\n" if part.startswith(("def ", "class ", "@", "#")) else "\n\n") + part
    return text + "\n"


def _one_meaning(own: Reached) -> dict[str, Meaning]:
    """Meaning of each name in a file. Raises ValueError for a name with two meanings or one that hides a builtin."""
    found: dict[str, Meaning] = {}
    for at, names in own.items():
        for name, where in {at[1]: at, **names}.items():
            if found.setdefault(name, where) != where or hasattr(builtins, name):
                raise ValueError(f"{name} is {where} in {at[0]}, and elsewhere {found[name]}: rename one")
    return found


def _in_order(own: Reached) -> list[str]:
    """The definitions' modules; each follows the modules that it imports."""
    needs: dict[str, set[str]] = {module: set() for module in sorted({at[0] for at in own})}
    for (module, _), names in own.items():
        needs[module] |= {where[0] for where in names.values() if isinstance(where, tuple)} & needs.keys()
    return list(TopologicalSorter({each: sorted(found - {each}) for each, found in needs.items()}).static_order())


def _definition(module: str, name: str, absent: set[str]) -> str:
    """Text of a definition. Functions in `absent` get a body that raises."""
    source = _module(module)
    if name in SECTIONS:
        return _section(SECTIONS[name])
    node, text = source.nodes[name], source.texts[name]
    first = (node.end_lineno or 0) - text.count("\n")
    lines: list[str | None] = list(text.splitlines())
    for function in _absent(node, absent):
        assert isinstance(function, ast.FunctionDef)
        indent, start, end = " " * function.col_offset, function.lineno - first, function.end_lineno or 0
        lines[start : end - first + 1] = [None] * (end - function.lineno + 1)
        reason = "no adapters here" if function.name in ADAPTERS else "this is part of a run: it needs cqwen_dist"
        head = f"{indent}def {function.name}(*args, **kwargs):\n"
        lines[start] = f"{head}{indent}    raise NotImplementedError({reason!r})"
    return "\n".join(line for line in lines if line is not None)


def _section(section: type[BaseModel]) -> str:
    lines = ["@dataclass(frozen=True)", f"class {section.__name__}:", f'    """{section.__doc__}"""', ""]
    for name, key in section.model_fields.items():
        lines += textwrap.wrap(str(key.description), WIDTH, initial_indent="    # ", subsequent_indent="    # ")
        value = repr(key.default)
        if isinstance(key.default, list):
            value = f"field(default_factory=lambda: {value})"
        lines.append(f"    {name}: {type(key.default).__name__} = {value}")
    return "\n".join([*lines, "", "    def model_dump(self):", "        return asdict(self)"])
