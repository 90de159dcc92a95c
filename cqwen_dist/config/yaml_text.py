"""YAML as a config file uses it: the core schema of YAML 1.2, each key once, no anchors.

PyYAML reads YAML 1.1, where `1e-3` is a string, `no` is false, `12:30` is 750 and `010` is 8. Editors (and the JSON
Schema they check with) go by 1.2, so do we. Reading and writing share one set of rules: what `dump` writes, `parse`
reads back as the same values.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from cqwen_dist.config.errors import Said, UserError

Path = tuple[str, ...]

_TAG = "tag:yaml.org,2002:"
_SCALARS = (
    (f"{_TAG}null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (f"{_TAG}bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (f"{_TAG}int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        f"{_TAG}float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    """Plain values only: mappings, lists, text, numbers, true, false, null."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (as in PyYAML)
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:
            line = event.start_mark.line + 1
            raise UserError("config", Said(f"the anchor {event.anchor}"), "values written out", f"line {line}")
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that `_Loader` would otherwise read as something else."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (as in PyYAML)

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _first)


def _mapping(loader: _Loader, node: yaml.Node) -> dict[Any, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise yaml.constructor.ConstructorError(None, None, "a value tagged as a mapping", node.start_mark)
    found: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node)
        found[key] = loader.construct_object(value_node, deep=True)
    return found


def _list(loader: _Loader, node: yaml.Node) -> list[Any]:
    return loader.construct_sequence(node, deep=True)  # type: ignore[arg-type]


def _text(loader: _Loader, node: yaml.Node) -> str:
    value = str(loader.construct_scalar(node))  # type: ignore[arg-type]
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("config", value, "text without lone surrogates", f"line {node.start_mark.line + 1}") from None
    return value


def _int(loader: _Loader, node: yaml.Node) -> int:
    text = str(loader.construct_scalar(node))  # type: ignore[arg-type]
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    try:
        return int(text[2:] if base != 10 else text, base)
    except ValueError:  # only by an explicit !!int, or more digits than Python reads
        raise UserError("config", text, "a whole number", f"line {node.start_mark.line + 1}") from None


def _float(loader: _Loader, node: yaml.Node) -> float:
    text = str(loader.construct_scalar(node)).lower()  # type: ignore[arg-type]
    try:
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        raise UserError("config", text, "a number", f"line {node.start_mark.line + 1}") from None


def _bool(loader: _Loader, node: yaml.Node) -> bool:
    text = str(loader.construct_scalar(node)).lower()  # type: ignore[arg-type]
    if text not in ("true", "false"):
        raise UserError("config", text, "true or false", f"line {node.start_mark.line + 1}")
    return text == "true"


_CONSTRUCTORS: tuple[tuple[str | None, Any], ...] = (
    (f"{_TAG}map", _mapping),
    (f"{_TAG}seq", _list),
    (f"{_TAG}str", _text),
    (f"{_TAG}int", _int),
    (f"{_TAG}float", _float),
    (f"{_TAG}bool", _bool),
    (f"{_TAG}null", lambda loader, node: None),
    (None, yaml.SafeLoader.construct_undefined),
)
for _kind, _constructor in _CONSTRUCTORS:
    _Loader.add_constructor(_kind, _constructor)


def parse(text: str) -> tuple[Any, dict[Path, int]]:
    """The values of a YAML text, and the line of every key and list item. Raises `UserError`."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[Path, int] = {}
        if node is None:
            return None, lines
        _lines(node, (), lines)
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "no YAML").removeprefix(
            "but found "
        )
        allowed = "YAML"
        if "'\\t'" in problem:
            problem, allowed = "a tab", "spaces for indentation"
        raise UserError("config", Said(problem), allowed, f"line {mark.line + 1}" if mark else "") from None
    except RecursionError:
        raise UserError("config", Said("values nested too deep"), "a few levels") from None


def _lines(node: yaml.Node, path: Path, lines: dict[Path, int]) -> None:
    """Note the line of every key and item below a node; a key that stands twice stops here."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, str(index))] = item.start_mark.line + 1
            _lines(item, (*path, str(index)), lines)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                name = ".".join(path) or "config"
                raise UserError(name, Said("a list or mapping as a key"), "plain names", f"line {line}")
            here = (*path, str(key.value))
            if here in lines:
                twice = "it twice" if lines[here] == line else f"it in lines {lines[here]} and {line}"
                raise UserError(".".join(here), Said(twice), "each key once", f"line {line}")
            lines[here] = line
            _lines(value, here, lines)


_UNICODE_BREAKS = frozenset("\x85\u2028\u2029")  # line breaks to YAML 1.1


def dump(value: Any) -> str:
    """YAML text that `parse` reads back as an equal value."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    if _UNICODE_BREAKS.isdisjoint(text):
        return text
    # PyYAML writes these inside a string as they are, and reads them back as a space: escape all but ASCII
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False))
