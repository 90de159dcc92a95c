"""Converts pydantic's errors to one line for the user: the key, the value found, the values allowed."""

import difflib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError

from cqwen_dist.config.errors import Said
from cqwen_dist.config.schema import Config, Section

Path = tuple[str, ...]

# pydantic's error types in YAML's terms
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "string": "text (put it in quotes)",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
}


@cache
def elsewhere() -> dict[str, str]:
    """Name of a key in other projects -> our key."""
    text = files("cqwen_dist.config").joinpath("names.yaml").read_text(encoding="utf-8")
    return {name: key for key, names in yaml.safe_load(text).items() for name in names.split()}


def explain(error: ValidationError, tree: Any) -> tuple[Path, object, str]:
    """Returns (path, found, allowed) for the most helpful error. tree: the validated input."""
    errors = [(_path(item["loc"], tree), item) for item in error.errors(include_url=False)]
    # A misspelled key also leaves the right key missing: report the misspelling.
    errors.sort(key=lambda pair: pair[1]["type"] not in ("extra_forbidden", "invalid_key"))
    # Every member of a union reports an error: the deepest one belongs to the intended member.
    top = errors[0][0]
    path = max((p for p, _ in errors if p[: len(top)] == top), key=len)
    # A union reports one error per member at the same path: their allowed values are joined with "or".
    same = [item for p, item in errors if p == path]
    first = same[0]
    kind = first["type"]
    if kind == "refused":
        return (*path, *first["ctx"]["key"].split(".")), first["ctx"]["found"], first["ctx"]["allowed"]
    if kind == "extra_forbidden":
        return path, Said(f"unknown key{_instead(path)}"), ""
    if kind == "invalid_key":
        return path, first["input"], "a name"
    if kind == "missing":
        return path, "no value", _section_words(annotation_at(path)) or "a value (this key is required)"
    found = Said("a mapping") if isinstance(first["input"], dict) else first["input"]
    return path, found, " or ".join(dict.fromkeys(_allowed(item, path) for item in same))


def annotation_at(path: Path) -> Any:
    """Declared type at a dotted path; None if the schema has none."""
    at: Any = Config
    for part in path:
        members = list(members_of(at))
        lists = [m for m in members if get_origin(m) in (list, tuple)]
        section = section_of(at)
        if section is not None and part in section.model_fields and not lists:
            at = section.model_fields[part].annotation
        elif lists and part.isdecimal():
            at = get_args(lists[0])[0]
        elif any(get_origin(m) is dict for m in members):
            at = next(get_args(m)[1] for m in members if get_origin(m) is dict)
        else:
            return None
    return at


def members_of(annotation: Any) -> Iterator[Any]:
    """Members of a union, without `Annotated`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from members_of(args[0])
    elif origin is not None and origin not in (list, tuple, dict, Literal):
        for arg in args:
            yield from members_of(arg)
    else:
        yield annotation


def section_of(annotation: Any) -> type[Section] | None:
    """The section class in a type (not: a list of sections)."""
    members = members_of(annotation)
    return next((each for each in members if isinstance(each, type) and issubclass(each, Section)), None)


def _path(loc: tuple[int | str, ...], tree: Any) -> Path:
    """pydantic's location, without the names of union members."""
    path: list[str] = []
    for part in loc:
        if isinstance(tree, dict):
            key = next((key for key in tree if str(key) == str(part)), None)
            section = section_of(annotation_at(tuple(path)))
            if key is None and not (section and part in section.model_fields):
                continue
            path.append(str(part))
            tree = tree.get(key) if key is not None else None
        elif isinstance(tree, (list, tuple)) and isinstance(part, int):
            path.append(str(part))
            tree = tree[part] if part < len(tree) else None
    return tuple(path)


def _allowed(item: Any, path: Path) -> str:
    kind = item["type"]
    if kind in ("model_type", "model_attributes_type"):
        return _section_words(annotation_at(path))
    if kind == "string_too_short":
        return "text that is not empty"
    if kind == "too_short":
        return f"at least {item['ctx']['min_length']} item{'s' * (item['ctx']['min_length'] > 1)}"
    if kind.endswith(("_type", "_parsing", "_number", "_float", "_size", "_length")) and kind.split("_")[0] in _WORDS:
        return _WORDS[kind.split("_")[0]]
    return str(item["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")


def _section_words(annotation: Any) -> str:
    section = section_of(annotation)
    return "" if section is None else f"a section with {', '.join(section.model_fields)}"


def _instead(path: Path) -> str:
    """Suggestion for an unknown key, then the keys of its section."""
    section = section_of(annotation_at(path[:-1]))
    names = list(section.model_fields) if section else []
    meant = difflib.get_close_matches(path[-1], names, n=1)
    if (key := elsewhere().get(path[-1])) is not None:
        own = key.rsplit(".", 1)[-1]
        meant = [".".join((*path[:-1], own)) if own in names else key]
    meant = meant or [place for place in _places(Config, "") if place.rsplit(".", 1)[-1] == path[-1]]
    hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
    return f"{hint} (known keys: {', '.join(names)})"


def _places(section: type[Section], prefix: str) -> Iterator[str]:
    """Every dotted key in the schema, with N for list indices."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        for member in members_of(field.annotation):
            if get_origin(member) is list and (item := section_of(get_args(member)[0])):
                yield from _places(item, f"{prefix}{name}.N.")
        inner = section_of(field.annotation)
        if inner is not None:
            yield from _places(inner, f"{prefix}{name}.")
