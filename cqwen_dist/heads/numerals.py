"""A number's decimal notation as tensors: what a base reads behind `<NUM>` (`data.keep_digits`).

`data.write_numbers.in_decimals` writes the same characters in Python, in workers without torch.
"""

import torch
from torch import Tensor

from cqwen_dist.config.shape import CHARACTERS, FRACTIONS_BELOW, LONGEST_NUMERAL, MOST_SHOWN, PLACES_SHOWN

MINUS_SIGN, POINT = CHARACTERS.index("-"), CHARACTERS.index(".")


def characters(values: Tensor, count: int = LONGEST_NUMERAL) -> Tensor:
    """The first characters of values [...] float64: [...,count] int64, places in `CHARACTERS`, -1 behind the last.

    The shortest exact decimals, at most `PLACES_SHOWN`; none from `FRACTIONS_BELOW` on. From `MOST_SHOWN`
    on, and for NaN, there are no characters. Exact: each step is one rounded operation, as in Python.
    """
    tens = torch.pow(10, torch.arange(16, device=values.device))  # integers: a power of floats may round
    size = values.double().abs()
    shown = size < MOST_SHOWN
    size = size.where(shown, 0.0).unsqueeze(-1)

    # Decimals, all digits as one integer, and how many they are
    few = tens[: PLACES_SHOWN + 1]
    scaled = (size * few.double()).round()
    fits = (scaled / few.double() == size) | (few == few[-1])
    decimals = fits.int().argmax(-1, keepdim=True).masked_fill(size >= FRACTIONS_BELOW, 0)
    units = scaled.gather(-1, decimals).long()
    digits = ((units >= tens[1:]).sum(-1, keepdim=True) + 1).maximum(decimals + 1)

    # Each character by its place: a sign, digits, a point, digits
    at = torch.arange(count, device=values.device) - (values < 0).long().unsqueeze(-1)
    point = digits - decimals
    behind = digits - 1 - at + (at > point).long()  # digits behind this one
    digit = torch.div(units, tens[behind.clamp(0, 15)], rounding_mode="floor") % 10
    found = digit.masked_fill((at == point) & (decimals > 0), POINT).masked_fill(at < 0, MINUS_SIGN)
    return found.masked_fill((at >= digits + (decimals > 0).long()) | ~shown.unsqueeze(-1), -1)


def shown_ids(ids: Tensor, values: Tensor, num_token_id: int, rows: Tensor) -> Tensor:
    """ids [...] with each number's first character in place of `<NUM>`, if it has one. rows: of `CHARACTERS`."""
    first = characters(values, 1)[..., 0]
    return torch.where((ids == num_token_id) & (first >= 0), rows[first.clamp(min=0)], ids)


def next_character(is_number: Tensor, values: Tensor, last: Tensor) -> Tensor:
    """The next characters of texts inside a numeral [R] int64: places in `CHARACTERS`; -1 where none has to follow.

    is_number [R,T] bool, values [R,T] float64: of the texts. last [R] or [1]: their last position; later ones are not
    read.
    """
    numeral, so_far = _last_numeral(is_number, values, last)
    found = numeral.gather(1, so_far.clamp(max=LONGEST_NUMERAL - 1).unsqueeze(1))[:, 0]
    return found.masked_fill(so_far >= LONGEST_NUMERAL, -1)


def ends_in_number(is_number: Tensor, values: Tensor, last: Tensor) -> Tensor:
    """Whether the last token of each text [R] is a number or one of its characters. Arguments as `next_character`."""
    numeral, so_far = _last_numeral(is_number, values, last)
    return so_far <= (numeral >= 0).sum(1).clamp(min=1)


def _last_numeral(is_number: Tensor, values: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """(characters [R,L] of each text's last number, how many tokens there are from it on [R]; many without one)."""
    places = torch.arange(values.shape[1], device=values.device)
    at = places.where(is_number & (places <= last.unsqueeze(-1)), -LONGEST_NUMERAL).amax(1)
    return characters(values.gather(1, at.clamp(min=0).unsqueeze(1))[:, 0]), last - at + 1


def only(scores: Tensor, tokens: Tensor) -> Tensor:
    """scores [R,V] with 0 at a row's token [R] and -inf elsewhere; rows without one (-1) stay as they are."""
    alone = torch.full_like(scores, -torch.inf).scatter(1, tokens.clamp(min=0).unsqueeze(1), 0.0)
    return alone.where((tokens >= 0).unsqueeze(1), scores)


def given_digits(is_number: Tensor, values: Tensor) -> Tensor:
    """Whether each position [B,T] is one of the characters behind a number. Arguments [B,T] as `next_character`."""
    places = torch.arange(values.shape[1], device=values.device)
    lengths = (characters(values) >= 0).sum(-1).clamp(min=1)
    return (places < (places + lengths).where(is_number, 0).cummax(1).values) & ~is_number
