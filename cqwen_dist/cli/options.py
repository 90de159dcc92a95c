"""Options that a verb takes as one object: a dataclass whose fields are declared as typer's options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
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
            for each in fields(groups[name]):
                default = each.default if each.default_factory is MISSING else each.default_factory()
                default = Parameter.empty if default is MISSING else default
                kind = Parameter.KEYWORD_ONLY
                parameters.append(Parameter(each.name, kind, default=default, annotation=of_field[each.name]))
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
