"""Config keys that determine a model's shape, listed once for code that builds, compares and counts models."""

NONE, ARITHMETIC = "none", "arithmetic"  # model.candidates
PLACES, COMPUTED, CONSTANTS = 24, 8, 48  # candidates by kind (`heads.candidates`)
CANDIDATES = PLACES + COMPUTED + CONSTANTS

SIGNS = "+-*/()=%"  # of arithmetic
A_TOKEN = 2  # signs of a token at most, such as ")="; another token ends an expression


CHARACTERS = "0123456789-."  # of a numeral (`data.keep_digits`)
DIGIT_COUNT = 10  # how many of them are digits
# Rows that candidates share, by what they say: whether the text has the value already; the numeral's first character;
# its first two, where the second may be none and a point is never the first; its length (the last row: seven or more)
FORMS = {"again": 4, "first": len(CHARACTERS), "two": (len(CHARACTERS) - 1) * (len(CHARACTERS) + 1), "length": 7}
FORM_ROWS = sum(FORMS.values())
PLACES_SHOWN, FRACTIONS_BELOW, MOST_SHOWN = 6, 1e9, 1e15  # decimals at most; up to where there are any; up to where
LONGEST_NUMERAL = 17  # a sign, nine digits, a point and six decimals; or a sign and fifteen digits


# `CausalQwenConfig` field -> config key.
SHAPE_KEYS = {
    **{name: f"model.{name}" for name in ("causal_size", "wide", "abduction", "number_head", "candidates")},
    "random_features": "model.wide",
    "depths": "model.wide",
    "number_dims": "start",
}


def number_parameters(candidates: str, words: int, size: int) -> int:
    """Parameters of the number head, if C_w = words and C = size: W_reg and b_reg; a row, a bias and a noise for each
    candidate; a row and a bias for each of `FORMS`."""
    if candidates == NONE:
        return size + 1
    return size + 1 + CANDIDATES * (words + 2) + FORM_ROWS * (words + 1)
