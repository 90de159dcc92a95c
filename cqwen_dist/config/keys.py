"""Every config key: its tier (basic keys are common, expert keys rare), the JSON Schema, and a Markdown page."""

import json
from collections.abc import Iterator
from typing import Any

from cqwen_dist.config.schema import Config
from cqwen_dist.config.templates import template

# By section, in config order. Sections not listed have only expert keys.
_BASIC = {
    "model": "name_or_path architecture tokenizer candidates gradient_checkpointing compile_layers warm_start",
    "model.lora": "r alpha dropout target_modules",
    "data": "train eval eval_fraction watch recipe text_field text_template prompt_template sequence_length pack "
    "numeric_targets",
    "loss": "reg_weight target_transform constraint.mode constraint.eps",
    "stages": "name train steps epochs until.metric until.patience until.max_steps lr lr_groups warmup_steps",
    "parallel": "zero_stage vocab_group_size",
    "train": "global_batch_size micro_batch_size precision seed checkpoint_every eval_every best_metric",
    "run": "dir name resume wandb",
}
BASIC = ("start", *(f"{section}.{key}" for section, keys in _BASIC.items() for key in keys.split()))
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def json_schema(basic_only: bool = False) -> str:
    """JSON Schema for config files, with each key's tier in `x-tier`. Editors use it for completion.

    basic_only: omit expert keys.
    """
    schema = Config.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    used = set()

    def mark(section: dict[str, Any], path: str) -> None:
        kept = {}
        for name, found in section.get("properties", {}).items():
            place = f"{path}.{name}" if path else name
            basic = any(f"{place}.".startswith(f"{key}.") or f"{key}.".startswith(f"{place}.") for key in BASIC)
            if basic_only and not basic:
                continue
            kept[name] = {**found, "x-tier": "basic" if basic else "expert"}
            if "description" in found:
                kept[name]["description"] = " ".join(found["description"].split())
            for other in sections_of(found):
                used.add(other)
                mark(definitions[other], place)
        section["properties"] = kept

    mark(schema, "")
    schema["$defs"] = {name: definition for name, definition in definitions.items() if name in used}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, ensure_ascii=False)


def sections_of(key: dict[str, Any]) -> list[str]:
    """Names of the sections that a key refers to."""
    found = [key["$ref"].rsplit("/", 1)[1]] if "$ref" in key else []
    parts = (*key.get("anyOf", ()), *key.get("allOf", ()), *key.get("patternProperties", {}).values())
    for part in (*parts, key.get("items"), key.get("additionalProperties")):
        found += sections_of(part) if isinstance(part, dict) else []
    return found


def schema_markdown(schema: dict[str, Any]) -> str:
    """The schema as Markdown, one table per section. schema: from `json_schema`, parsed."""
    top = {"description": "A whole run.", **schema}
    return template("cqwen_dist.config", "keys.md.j2").render(sections=_sections("", top, schema["$defs"]))


def _sections(path: str, section: dict[str, Any], known: dict[str, Any]) -> Iterator[tuple[str, str, Any, list[Any]]]:
    """(dotted key, anchor, section, the cells of each of its keys) of a section and all below it."""
    rows, below = [], []
    for name, key in section["properties"].items():
        place = f"{path}.{name}" if path else name
        inner = dict.fromkeys(sections_of(key))
        types = {part.get("type") for part in key.get("anyOf", [key])}
        one = "$ref" in key or (inner and not {"string", "number", "boolean"} & types)
        shown = f"[section](#{_anchor(place)})" if one else _allowed(key)
        default = "" if one else "**required**" if name in section.get("required", ()) else _code(key.get("default"))
        bold = "**" if key.get("x-tier") == "basic" else ""
        rows.append([f"{bold}`{name}`{bold}", shown, default, _cell(key.get("description", ""))])
        below += [(place, known[other]) for other in inner]
    yield path, _anchor(path or "the-file"), section, rows
    for place, other in below:
        yield from _sections(place, other, known)


def _allowed(key: dict[str, Any]) -> str:
    """Allowed values in a few words. Omits null, which means the default."""
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
    """Description for a table cell, escaped so that <NUM> is not a tag; code in backticks stays unchanged."""
    parts = text.replace("|", "\\|").replace("\n", " ").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;").replace("*", "\\*") for i, part in enumerate(parts))


def _anchor(path: str) -> str:
    return path.replace(".", "-").replace("_", "-")
