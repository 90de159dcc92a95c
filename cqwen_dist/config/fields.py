"""Building blocks for the schema: bounded types, sections, validator errors."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def no_bool(value: object) -> object:
    """Reject booleans, because Python treats True as 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "a whole number")
    return value


def unless(reasons: Mapping[object, str]) -> BeforeValidator:
    """Rejects these values, each with its reason, before the type lists the allowed values."""

    def check(value: object) -> object:
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value in reasons:
            raise PydanticCustomError("explained", reasons[value])
        return value

    return BeforeValidator(check)


# Strict: true and "3" are not numbers. Floats also accept integers.
Positive = Annotated[int, Field(gt=0, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**32, strict=True)]  # the range of numpy's generators
Real = Annotated[float, Field(strict=True)]
NonNegative = Annotated[float, Field(ge=0, strict=True)]
Above0 = Annotated[float, Field(gt=0, strict=True)]
Share = Annotated[float, Field(ge=0, lt=1, strict=True)]


def refused(key: str, found: object, allowed: str = "") -> PydanticCustomError:
    """Error raised by validators. `key` is relative to its section; reading.py converts it to a `UserError`."""
    return PydanticCustomError(
        "refused", "{allowed}" if allowed else "{found}", {"key": key, "found": found, "allowed": allowed}
    )


class Section(BaseModel):
    """Part of the config. No unknown keys, no NaN or infinity; immutable.

    The text below a key is its description in the JSON Schema.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
