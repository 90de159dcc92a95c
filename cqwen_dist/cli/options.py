"""Options that a verb takes as one object: a dataclass whose fields are declared as typer's options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def flat(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb as typer reads it: in place of a dataclass each of its fields is an option."""
    hints = get_type_hints(verb, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)}
    parameters: list[Parameter] = []
    for name, own in signature(verb).parameters.items():
        if name in groups:
            of_field = get_type_hints(groups[name], include_extras=True)
            parameters += [
                Parameter(each.name, Parameter.KEYWORD_ONLY, default=_default(each), annotation=of_field[each.name])
                for each in fields(groups[name])
            ]
        else:
            parameters.append(own.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(verb)
    def called(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        verb(**given)

    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default
