"""Config keys that determine a model's shape, listed once for code that builds, compares and counts models."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cqwen_dist.config.schema import Config


class NumberKey(NamedTuple):
    """A key that makes the number head another kind (`heads.number_kinds`)."""

    key: str
    default: Any  # without it
    parameters: Callable[[Any, int, int], int]  # (its value, C_w, C) -> how many parameters it adds to a plain head


# By the field of `CausalQwenConfig` that a key sets.
NUMBER_KEYS = {
    "number_types": NumberKey("data.number_types", None, lambda types, words, size: (2 * len(types) - 1) * (size + 1)),
    "more_values": NumberKey("data.more_values", None, lambda names, words, size: len(names) * (size + 1)),
    "number_head": NumberKey("model.number_head", None, lambda name, words, size: 0),  # which says not how many it has
    "copies": NumberKey("model.copies", 0, lambda count, words, size: count * (words + 2)),
}
_MODEL = ("causal_size", "number_dims", "wide", "random_features", "value_periods", "abduction", "scale_activation")
SHAPE_KEYS = {
    **{name: f"model.{name}" for name in _MODEL},
    "scalar_threshold": "train.thresholds",
    **{name: key.key for name, key in NUMBER_KEYS.items()},
}


def model_shape(config: Config) -> dict[str, Any]:
    """Fields of `CausalQwenConfig` as a run sets them."""
    return {
        **{name: attrgetter(key)(config) for name, key in SHAPE_KEYS.items()},
        "number_dims": config.number_dims,
        "number_types": config.data.types,
        "more_values": config.data.more_values or None,
        "scalar_threshold": config.train.thresholds == "scalar",
    }


def number_parameters(config: Config, words: int, size: int) -> int:
    """How many parameters the number head has, with words dimensions C_w of U's C = size."""
    shape = model_shape(config)
    more = (key.parameters(shape[name], words, size) for name, key in NUMBER_KEYS.items() if shape[name])
    return size + 1 + sum(more)  # W_reg and b_reg
