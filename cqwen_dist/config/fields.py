"""The building blocks of the schema: types with bounds, the section, the error of a validator."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def no_bool(value: object) -> object:
    """Python takes True for 1; a config does not."""
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "a whole number")
    return value


# Strict: neither true nor "3" is a number. A float also takes a whole number.
Positive = Annotated[int, Field(gt=0, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**32, strict=True)]  # as numpy's generators take it
Real = Annotated[float, Field(strict=True)]
NonNegative = Annotated[float, Field(ge=0, strict=True)]
Above0 = Annotated[float, Field(gt=0, strict=True)]
Share = Annotated[float, Field(ge=0, lt=1, strict=True)]
Unit = Annotated[float, Field(ge=0, le=1, strict=True)]
# A key of a mapping: JSON writes it as text, so text of digits is taken.
WordId = Annotated[int, BeforeValidator(no_bool), Field(ge=0)]


def refused(key: str, found: object, allowed: str) -> PydanticCustomError:
    """The error that a validator raises: `key` is relative to its section; reading.py makes it a `UserError`."""
    return PydanticCustomError("refused", "{allowed}", {"key": key, "found": found, "allowed": allowed})


class Section(BaseModel):
    """A part of the config: no unknown keys, no NaN or infinity, never changed once read.

    The text below a key is its description in the JSON Schema.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
