"""Reads a YAML file and dotted overrides to a checked `Config`, or raises a one-line `UserError`.

Reading imports no torch, uses no network and writes no file.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from cqwen_dist.config import yaml_text
from cqwen_dist.config.deepspeed_section import check_section
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.messages import annotation_at, explain, members_of, section_of
from cqwen_dist.config.schema import Config, Section

# Keys that may change when a run is resumed.
RESUMABLE = (
    *("run.", "parallel.", "deepspeed.", "model.compile_layers", "model.attention"),
    *("train.micro_batch_size", "train.checkpoint_", "train.eval_every", "train.keep_", "train.best_metric"),
    *("train.feature_cache.", "train.profile", "data.cache_dir"),
    # Paths may change; their contents are compared instead (`checkpoint.resume`).
    *("data.train", "data.eval", "model.name_or_path", "model.tokenizer"),
    "data.number_columns",  # how the same texts are read
)
_OF_A_RUN = "config.yaml"  # in a run folder, as resolved
_OF_A_COMMAND = ("resume", "accept", "stop_after")  # keys of `run` that a run folder's next command does not take over
_RESUMABLE_OF_A_STAGE = re.compile(r"stages\.\d+\.micro_batch_size")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML config, apply dotted overrides, validate. Raises `UserError`. Does not write.

    path: a file, or a run folder, which has the config of its last command, overrides included.
    """
    folder = Path(path)
    if of_a_run := (folder / _OF_A_RUN).is_file():
        path = folder / _OF_A_RUN
    try:
        tree, lines = yaml_text.parse(_read(Path(path)))
    except UserError as error:
        where = f"{path}, {error.where}" if error.where else str(path)
        raise UserError(error.key, error.found, error.allowed, where) from None
    if not isinstance(tree, dict):
        found = "no content" if tree is None else tree
        raise UserError("config", found, f"a mapping with {', '.join(Config.model_fields)}", str(path))
    if of_a_run:  # it may have been moved
        kept = {key: value for key, value in tree.get("run", {}).items() if key not in _OF_A_COMMAND}
        tree["run"] = {**kept, "dir": str(folder)}
    return _validated(tree, lines, str(path), {_override(tree, text): text for text in overrides})


def given_config(given: Config | Mapping[str, Any] | str | Path, overrides: Mapping[str, Any]) -> Config:
    """Validate a config from Python: a file path, a `Config`, or a dict with plain values and sections such as `Stage`.

    overrides: by dotted key. Raises `UserError`.
    """
    if isinstance(given, (str, Path)):
        given = load_config(given)
    tree = _plain(given)
    if not isinstance(tree, dict):
        raise UserError("config", given, "a path, a dict, or a cqwen_dist.Config")
    return _validated(tree, {}, "", {_override(tree, f"{key}=", (_plain(overrides[key]),)): key for key in overrides})


def _plain(value: Any) -> Any:
    """Convert sections to dicts, paths to text, and NumPy's and torch's scalars to Python's."""
    if isinstance(value, Section):
        return value.model_dump()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "shape", None) == ():
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _validated(tree: dict[str, Any], lines: Mapping[Any, int], path: str, overridden: Mapping[Any, str]) -> Config:
    """lines: line numbers in the file `path` by key; overridden: key -> the override that set it."""
    try:
        config = Config.model_validate(tree)
        check_section(config)
        return config
    except (ValidationError, UserError) as error:
        if isinstance(error, UserError):
            key, found, allowed = tuple(error.key.split(".")), error.found, error.allowed
        else:
            key, found, allowed = explain(error, tree)
        raise UserError(".".join(key), found, allowed, next(_places_of(key, lines, path, overridden))) from None
    except RecursionError:
        raise UserError("config", Said("values nested too deep"), "a few levels", path) from None


def _places_of(
    key: tuple[str, ...], lines: Mapping[Any, int], path: str, overridden: Mapping[Any, str]
) -> Iterator[str]:
    """What set a key's value, likeliest first: the override or file line for the longest known prefix of the key."""
    prefixes = [key[:end] for end in range(len(key), 0, -1)]
    yield from (_where(overridden[prefix]) for prefix in prefixes if prefix in overridden)  # in place of the file's
    for prefix in prefixes:
        if prefix in lines:
            yield f"{path}, line {lines[prefix]}"
        below = [text for changed, text in overridden.items() if changed[: len(prefix)] == prefix]
        yield from map(_where, below[-1:])
    yield path


def _read(path: Path) -> str:
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError("config", Said("a pipe or device"), "the path of a YAML file")  # reading might never end
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError("config", Said("no such file"), "the path of a YAML file") from None
    except IsADirectoryError:
        run = path / "run"  # of a `cqwen fit`
        allowed = f"{run} (or the same cqwen fit again)" if (run / _OF_A_RUN).is_file() else "a run folder"
        raise UserError("config", Said("a folder"), f"the path of a YAML file, or {allowed}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError("config", Said(reason), "the path of a readable YAML file") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError("config", Said(f"byte 0x{data[error.start]:02x}"), "UTF-8 text", f"line {line}") from None


def _override(tree: dict[str, Any], text: str, given: tuple[Any, ...] = ()) -> tuple[str, ...]:
    """Apply a dotted `key=value` to the tree in place; returns the path. given: the value, if it is not text."""
    key, equals, raw = text.partition("=")
    raw = raw.lstrip() if key.endswith(" ") else raw
    path = tuple(key.strip().split("."))
    if not equals or not all(path) or not yaml_text.is_text(text):
        raise UserError("override", text, "key=value, for instance stages.0.steps=3")
    at: Any = tree
    for depth, part in enumerate(path):
        above = path[:depth]
        index: Any = part
        if isinstance(at, list):
            if not part.isdecimal() or int(part) >= len(at):
                allowed = f"an index from 0 to {len(at) - 1}" if at else "no index: the list is empty"
                raise UserError(".".join(above), Said(f"index {part}"), allowed, _where(text))
            index = int(part)
        elif not isinstance(at, dict):
            raise UserError(".".join(above), at, f"a list or section, to set {part} in it", _where(text))
        if depth == len(path) - 1:
            at[index] = given[0] if given else _override_value(path, raw, text)
        elif isinstance(at, dict) and at.get(index) is None:
            at[index] = _default_at((*above, part))
        at = at[index]
    return path


def _default_at(path: tuple[str, ...]) -> dict[str, Any] | list[Any]:
    """Initial value if an override changes a key that the file lacks: the schema's list, or an empty section."""
    section = section_of(annotation_at(path[:-1]))
    field = None if section is None else section.model_fields.get(path[-1])
    default = None if field is None else field.get_default()
    return _plain(default) if isinstance(default, (list, tuple)) else {}


def _override_value(path: tuple[str, ...], raw: str, text: str) -> Any:
    """Value of an override, as YAML. For text keys, quotes are optional and # does not start a comment."""
    kinds = list(members_of(annotation_at(path)))
    try:
        value, _ = yaml_text.parse(raw)
    except UserError as error:
        if str in kinds:
            return raw
        inner = () if error.key == "config" else (error.key,)
        raise UserError(".".join((*path, *inner)), error.found, error.allowed, _where(text)) from None
    # A text key keeps these parsed values: null, quoted text, and numbers or lists if its type allows them.
    meant = (
        value is None
        or (isinstance(value, str) and raw.lstrip()[:1] in ("'", '"'))
        or (type(value) in (int, float) and float in kinds)
        or (isinstance(value, list) and list in [get_origin(kind) for kind in kinds])
    )
    return raw if str in kinds and not meant else value


def _where(text: str) -> str:
    text = text.removesuffix("=")
    return f"override {text}" if len(text) <= 80 else f"override {text[:77]}..."


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings and lists as one dict by dotted key, without empty ones."""
    return {key: value for key, value in yaml_text.leaves(tree, lists=True) if value not in ({}, [])}


def changed_keys(old: Config, new: Config, begun: bool = True) -> list[tuple[str, object, object]]:
    """Dotted keys that differ between two configs. begun: only keys that a resumed run must not change."""
    # Compare resolved configs, so that writing out a default is no change.
    a, b = flat(old.model_dump(mode="json")), flat(new.model_dump(mode="json"))
    free = [k for k in {**a, **b} if k.startswith(RESUMABLE) or _RESUMABLE_OF_A_STAGE.fullmatch(k)]
    keys = [k for k in {**a, **b} if a.get(k) != b.get(k) and not (begun and k in free)]
    return [(k, a.get(k), b.get(k)) for k in keys]
