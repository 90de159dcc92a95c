"""Config keys that determine a model's shape, listed once for code that builds, compares and counts models."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cqwen_dist.config.schema import Config


class NumberKey(NamedTuple):
    """A config key that changes the number head's type (`heads.number_kinds`)."""

    key: str
    default: Any
    parameters: Callable[[Any, int, int], int]  # (its value, C_w, C) -> parameters added to a plain head


# `CausalQwenConfig` field -> config key.
NUMBER_KEYS = {
    "number_types": NumberKey("data.number_types", None, lambda types, words, size: (2 * len(types) - 1) * (size + 1)),
    "more_values": NumberKey("data.more_values", None, lambda names, words, size: len(names) * (size + 1)),
    "number_head": NumberKey("model.number_head", None, lambda name, words, size: 0),  # its size is unknown here
    "copies": NumberKey("model.copies", 0, lambda count, words, size: count * (words + 2)),
}
_MODEL = ("causal_size", "number_dims", "wide", "random_features", "value_periods", "abduction", "scale_activation")
SHAPE_KEYS = {
    **{name: f"model.{name}" for name in _MODEL},
    "scalar_threshold": "train.thresholds",
    **{name: key.key for name, key in NUMBER_KEYS.items()},
}


def model_shape(config: Config) -> dict[str, Any]:
    """`CausalQwenConfig` fields set by a run's config."""
    return {
        **{name: attrgetter(key)(config) for name, key in SHAPE_KEYS.items()},
        "number_dims": config.number_dims,
        "number_types": config.data.types,
        "more_values": config.data.more_values or None,
        "scalar_threshold": config.train.thresholds == "scalar",
    }


def number_parameters(config: Config, words: int, size: int) -> int:
    """Parameters in the number head, for `words` = C_w word dimensions and `size` = C dimensions of U."""
    shape = model_shape(config)
    more = (key.parameters(shape[name], words, size) for name, key in NUMBER_KEYS.items() if shape[name])
    return size + 1 + sum(more)  # W_reg and b_reg
