"""Config keys that determine a model's shape, listed once for code that builds, compares and counts models."""

from collections.abc import Callable
from typing import Any, NamedTuple

NONE, COPIES, ARITHMETIC = "none", "copies", "arithmetic"  # model.candidates
PLACES, COMPUTED, CONSTANTS = 24, 8, 48  # candidates by kind (`heads.candidates`)
AGAIN = 4  # rows by whether the text has the value already
CANDIDATES = {NONE: 0, COPIES: PLACES, ARITHMETIC: PLACES + COMPUTED + CONSTANTS}

SIGNS = "+-*/()=%"  # of arithmetic
A_TOKEN = 2  # signs of a token at most, such as ")="; another token ends an expression


CHARACTERS = "0123456789-."  # of a numeral (`data.keep_digits`)
PLACES_SHOWN, FRACTIONS_BELOW, MOST_SHOWN = 6, 1e9, 1e15  # decimals at most; up to where there are any; up to where
LONGEST_NUMERAL = 17  # a sign, nine digits, a point and six decimals; or a sign and fifteen digits


class NumberKey(NamedTuple):
    """A config key that changes the number head's type (`heads.action.number_head_of`)."""

    key: str
    default: Any
    parameters: Callable[[Any, int, int], int]  # (its value, C_w, C) -> parameters added to a plain head


def _of_candidates(kind: str, words: int, size: int) -> int:
    """Parameters: a row, a bias and a noise each; with arithmetic a row a character, and `AGAIN` rows and biases."""
    own = CANDIDATES[kind] * (words + 2)
    return own + (len(CHARACTERS) * words + AGAIN * (words + 1) if kind == ARITHMETIC else 0)


# `CausalQwenConfig` field -> config key.
NUMBER_KEYS = {
    "number_head": NumberKey("model.number_head", None, lambda name, words, size: 0),  # its size is unknown here
    "candidates": NumberKey("model.candidates", NONE, _of_candidates),
}
SHAPE_KEYS = {
    **{name: f"model.{name}" for name in ("causal_size", "wide", "abduction")},
    "random_features": "model.wide",
    "depths": "model.wide",
    "number_dims": "start",
    **{name: key.key for name, key in NUMBER_KEYS.items()},
}
