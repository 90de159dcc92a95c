"""Every config key as Markdown, from the JSON Schema: `cqwen config schema --markdown`, a page of the site."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cqwen_dist.config.tiers import sections_of

_HEAD = """# Every config key

Written by `cqwen config schema --markdown` out of the schema. **Bold** keys are those that most runs set; all others
have defaults that rarely change. An override is the key with its section: `train.seed=1`, `stages.0.lr=1e-4`.
"""
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def schema_markdown(schema: dict[str, Any]) -> str:
    """The schema's sections, a table each. schema: as `json_schema` gives it, parsed."""
    top = {"description": "A whole run.", **schema}
    return _HEAD + "".join(_section("", top, schema["$defs"]))


def _section(path: str, section: dict[str, Any], known: dict[str, Any]) -> Iterator[str]:
    rows, below = [], []
    for name, key in section["properties"].items():
        place = f"{path}.{name}" if path else name
        inner = dict.fromkeys(sections_of(key))
        one = "$ref" in key or (inner and not {"string", "number", "boolean"} & {*_types(key)})
        shown = f"[section](#{_anchor(place)})" if one else _allowed(key)
        default = "" if one else "**required**" if name in section.get("required", ()) else _code(key.get("default"))
        bold = "**" if key.get("x-tier") == "basic" else ""
        rows.append(f"| {bold}`{name}`{bold} | {shown} | {default} | {_cell(key.get('description', ''))} |\n")
        below += [(place, known[other]) for other in inner]
    yield f"\n## {path or 'The file'} {{ #{_anchor(path or 'the-file')} }}\n\n{section.get('description', '')}\n\n"
    yield "| key | allowed | default | |\n|---|---|---|---|\n"
    yield from rows
    for place, other in below:
        yield from _section(place, other, known)


def _types(key: dict[str, Any]) -> list[str]:
    return [str(part.get("type")) for part in key.get("anyOf", [key])]


def _allowed(key: dict[str, Any]) -> str:
    """The allowed values in a few words; null, which means the default, is left out."""
    if "anyOf" in key:
        return " or ".join(dict.fromkeys(_allowed(part) for part in key["anyOf"] if part.get("type") != "null"))
    if "enum" in key or "const" in key:
        return ", ".join(_code(value) for value in key.get("enum", [key.get("const")]))
    if "$ref" in key:
        return "a section"
    if key.get("type") == "array":
        return f"list of {_allowed(key['items'])}" if "items" in key else "list"
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true, false"}
    bounds = [f"{sign} {key[bound]:g}" for bound, sign in _BOUNDS.items() if bound in key]
    return " ".join([words.get(str(key.get("type")), "names with values"), *bounds])


def _code(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value)
    return "`" + text.replace("|", "\\|") + "`"


def _cell(text: str) -> str:
    """A description in a table cell: escaped, so that <NUM> is no tag, except for code in backticks."""
    parts = text.replace("|", "\\|").replace("\n", " ").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;").replace("*", "\\*") for i, part in enumerate(parts))


def _anchor(path: str) -> str:
    return path.replace(".", "-").replace("_", "-")
