"""From a YAML file and dotted overrides to a checked `Config`, or to one `UserError` line.

Reading imports no torch, touches no network and changes nothing in the world.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cqwen_dist.config.errors import UserError
from cqwen_dist.config.schema import (
    DEFAULT_STAGES,
    Config,
    DataConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    NumberPolicy,
    ParallelConfig,
    PretrainConfig,
    RunConfig,
    Section,
    Stage,
    TrainConfig,
)

# What may differ between the command that began a run and the one that goes on with it.
RESUMABLE = ("run.", "train.micro_batch_size", "train.checkpoint_every", "train.eval_every", "train.keep_checkpoints")


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that stands twice stops the run."""


def _mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        try:
            first = seen.setdefault(key, line)
        except TypeError:
            raise UserError("key", key, "a plain name", f"line {line}") from None
        if first != line:
            raise UserError(str(key), f"no single value: lines {first} and {line}", "each key once", f"line {line}")
    return yaml.SafeLoader.construct_mapping(loader, node, deep=deep)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _lines(node: yaml.Node | None, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    """Line number of every key of a composed YAML document, by path."""
    found: dict[tuple[str, ...], int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            found[here] = key.start_mark.line + 1
            found.update(_lines(value, here))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            here = (*path, str(index))
            found[here] = item.start_mark.line + 1
            found.update(_lines(item, here))
    return found


def _override(tree: dict[str, Any], text: str) -> tuple[str, ...]:
    """Apply one dotted `key=value` to the tree in place; returns the path."""
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise UserError("override", text, "key=value, for instance stages.0.steps=3")
    try:
        value = yaml.load(raw, _Loader)
    except yaml.YAMLError:
        value = raw
    path = tuple(key.split("."))
    at: Any = tree
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(at, list):
            if not part.isdigit() or int(part) >= len(at):
                raise UserError(key, part, f"an index below {len(at)}", "override")
            index: Any = int(part)
        elif isinstance(at, dict):
            index = part
            if not last and (index not in at or at[index] is None):
                at[index] = {}
        else:
            raise UserError(key, part, f"{'.'.join(path[:depth])} holds a single value", "override")
        if last:
            at[index] = value
        at = at[index]
    return path


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a YAML config, apply dotted overrides, validate. Raises `UserError`; reads only."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("config", str(path), "the path of a YAML file that exists") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("config", str(path), f"a readable UTF-8 YAML file ({error})") from None
    try:
        tree = yaml.load(text, _Loader)
        lines = _lines(yaml.compose(text, _Loader))
    except UserError as error:
        raise UserError(error.key, error.found, error.allowed, f"{path}, {error.where}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError("config", getattr(error, "problem", error), "YAML", f"{path}{line}") from None
    if not isinstance(tree, dict):
        raise UserError("config", tree, "a mapping with model, data, stages, ...", str(path))
    overridden = {}
    if any(text.startswith("stages.") for text in overrides) and "stages" not in tree:
        tree["stages"] = [stage.model_dump(mode="json") for stage in DEFAULT_STAGES]
    for text in overrides:
        overridden[_override(tree, text)] = text
    return _validate(tree, lines, overridden, str(path))


def _validate(
    tree: dict[str, Any], lines: dict[tuple[str, ...], int], overridden: dict[tuple[str, ...], str], where: str
) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        loc = tuple(str(part) for part in first["loc"])
        # pydantic puts the tried union member into the location: keep only what the file holds
        path = tuple(part for i, part in enumerate(loc) if _in_tree(tree, loc[: i + 1]) or _is_field(part))
        spot = where
        for end in range(len(path), 0, -1):
            if path[:end] in overridden:
                spot = f"override {overridden[path[:end]]}"
                break
            if path[:end] in lines:
                spot = f"{where}, line {lines[path[:end]]}"
                break
        raise UserError(".".join(path) or "config", _found(first), _allowed(first, loc), spot) from None


def _in_tree(tree: Any, path: tuple[str, ...]) -> bool:
    for part in path:
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and part.isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return False
    return True


def _is_field(part: str) -> bool:
    return any(part in section.model_fields for section in _SECTIONS)


_SECTIONS: tuple[type[Section], ...] = (
    Config, ModelConfig, LoraConfig, PretrainConfig, DataConfig, NumberPolicy, LossConfig, Stage, ParallelConfig,
    TrainConfig, RunConfig,
)  # fmt: skip


def _found(error: Any) -> object:
    if error["type"] == "missing":
        return "no value"
    if error["type"] == "extra_forbidden":
        return "no such key"
    return error["input"] if not isinstance(error["input"], dict) else "this section"


def _allowed(error: Any, loc: tuple[str, ...]) -> str:
    if error["type"] == "extra_forbidden":
        names = _fields_at(loc[:-1])
        close = difflib.get_close_matches(loc[-1], names, n=1)
        return (f"did you mean {close[0]}? " if close else "") + "one of " + ", ".join(names)
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    return "a value (this key is required)" if error["type"] == "missing" else message


def _fields_at(loc: tuple[str, ...]) -> list[str]:
    """The field names of the section at a location."""
    section: type[Section] = Config
    for part in loc:
        field = section.model_fields.get(part)
        if field is None:
            continue
        for candidate in _SECTIONS:
            if candidate.__name__ in str(field.annotation):
                section = candidate
                break
    return list(section.model_fields)


def json_schema() -> str:
    """JSON Schema of a config file; point an editor at it and keys complete."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, ensure_ascii=False)


def changed_keys(old: Config, new: Config) -> list[tuple[str, object, object]]:
    """The dotted keys in which two configs differ and that a resumed run may not change."""

    def flat(value: Any, prefix: str = "") -> dict[str, Any]:
        if isinstance(value, dict):
            return {k: v for key, item in value.items() for k, v in flat(item, f"{prefix}{key}.").items()}
        if isinstance(value, list):
            return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{prefix}{i}.").items()}
        return {prefix[:-1]: value}

    a, b = flat(old.model_dump(mode="json")), flat(new.model_dump(mode="json"))
    keys = [k for k in {**a, **b} if a.get(k) != b.get(k) and not k.startswith(RESUMABLE)]
    return [(k, a.get(k), b.get(k)) for k in keys]
