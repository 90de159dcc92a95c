"""YAML for config files: YAML 1.2's core schema, each key once, no anchors.

PyYAML implements YAML 1.1, where `1e-3` is a string, `no` is false, `12:30` is 750 and `010` is 8. Editors, and the
JSON Schema that they validate with, follow 1.2; so does this module. `parse` inverts `dump`.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import yaml

from cqwen_dist.config.errors import Said, UserError

Path = tuple[str, ...]

_TAG = "tag:yaml.org,2002:"


# Plain scalars: kind, pattern, possible first characters, parser, and allowed values for an explicit tag.
_SCALARS: tuple[tuple[str, str, list[str], Callable[[str], Any], str], ...] = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""], lambda text: None, ""),
    (
        "bool",
        r"true|True|TRUE|false|False|FALSE",
        list("tTfF"),
        lambda text: {"true": True, "false": False}[text.lower()],
        "true or false",
    ),
    (
        "int",
        r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
        list("-+0123456789"),
        lambda text: int(text, 0 if text[:2] in ("0o", "0x") else 10),
        "a whole number",
    ),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
        "a number",
    ),
)


class _Loader(yaml.SafeLoader):
    """Accepts plain values only: mappings, lists, text, numbers, true, false, null."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (as in PyYAML)
    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        f"{_TAG}map": yaml.SafeLoader.construct_yaml_map,
        f"{_TAG}seq": yaml.SafeLoader.construct_yaml_seq,
        f"{_TAG}str": yaml.SafeLoader.construct_yaml_str,
        None: yaml.SafeLoader.construct_undefined,
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:
            line = event.start_mark.line + 1
            raise UserError("config", Said(f"the anchor {event.anchor}"), "values written out", f"line {line}")
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that `_Loader` would not read as text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (as in PyYAML)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _scalar(read: Callable[[str], Any], allowed: str, loader: _Loader, node: yaml.Node) -> Any:
    """A node's value. Rejects invalid values, which need an explicit tag or too many digits to get here."""
    text = str(loader.construct_scalar(node))  # type: ignore[arg-type]
    try:
        return read(text)
    except (ValueError, KeyError):
        raise UserError("config", text, allowed, f"line {node.start_mark.line + 1}") from None


for _kind, _pattern, _first, _read, _allowed in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), _first)
    _Loader.add_constructor(_TAG + _kind, partial(_scalar, _read, _allowed))


def parse(text: str) -> tuple[Any, dict[Path, int]]:
    """Values of a YAML text, and the line of each key and list item. Raises `UserError`."""
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
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "no YAML"
        problem, allowed = str(problem).removeprefix("but found "), "YAML"
        if "'\\t'" in problem:
            problem, allowed = "a tab", "spaces for indentation"
        raise UserError("config", Said(problem), allowed, f"line {mark.line + 1}" if mark else "") from None
    except RecursionError:
        raise UserError("config", Said("values nested too deep"), "a few levels") from None


def _lines(node: yaml.Node, path: Path, lines: dict[Path, int]) -> None:
    """Record the line of every key and item below a node. Raises `UserError` for repeated keys and invalid text."""
    if isinstance(node, yaml.ScalarNode):
        if not is_text(node.value):
            raise UserError("config", node.value, "text without lone surrogates", f"line {node.start_mark.line + 1}")
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, str(index))] = item.start_mark.line + 1
            _lines(item, (*path, str(index)), lines)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                name = ".".join(path) or "config"
                raise UserError(name, Said("a list or mapping as a key"), "plain names", f"line {line}")
            _lines(key, path, lines)
            # PyYAML would silently keep the last of two equal keys.
            here = (*path, str(key.value))
            if here in lines:
                twice = "it twice" if lines[here] == line else f"it in lines {lines[here]} and {line}"
                raise UserError(".".join(here), Said(twice), "each key once", f"line {line}")
            lines[here] = line
            _lines(value, here, lines)


def is_text(value: str) -> bool:
    """Whether UTF-8 can encode it, so it has no lone surrogates."""
    return not any("\ud800" <= sign <= "\udfff" for sign in value)


def leaves(tree: Any, lists: bool = False, above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of nested mappings (lists: and lists, by index), with their values; an empty one is a value."""
    for key, value in enumerate(tree) if isinstance(tree, list) else tree.items():
        if value and isinstance(value, (dict, list) if lists else dict):
            yield from leaves(value, lists, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


_UNICODE_BREAKS = frozenset("\x85\u2028\u2029")  # YAML 1.1 treats these as line breaks


def dump(value: Any) -> str:
    """YAML text that `parse` reads as an equal value."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    if _UNICODE_BREAKS.isdisjoint(text):
        return text
    # PyYAML writes these characters unescaped and reads them back as a space, so escape everything except ASCII
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False))
