"""A number's decimal notation as tensors: what a base reads behind `<NUM>` (`data.keep_digits`).

`data.write_numbers.in_decimals` writes the same characters in Python, in workers without torch.
"""

import torch
from torch import Tensor

from cqwen_dist.config.shape import CHARACTERS, FRACTIONS_BELOW, LONGEST_NUMERAL, MOST_SHOWN, PLACES_SHOWN

MINUS_SIGN, POINT = CHARACTERS.index("-"), CHARACTERS.index(".")


def characters(values: Tensor) -> Tensor:
    """The characters of values [...] float64: [...,LONGEST_NUMERAL] int64, places in `CHARACTERS`, -1 behind the last.

    The shortest decimals that are the value, at most `PLACES_SHOWN`; none from `FRACTIONS_BELOW` on. From `MOST_SHOWN`
    on, and for NaN, there are no characters. Exact: each step is one rounded operation, as in Python.
    """
    size = values.double().abs()
    shown = size < MOST_SHOWN
    size = torch.where(shown, size, 0.0)
    places = torch.full_like(size, PLACES_SHOWN, dtype=torch.int64)
    for fewer in range(PLACES_SHOWN - 1, -1, -1):
        fits = (size * 10.0**fewer).round() / 10.0**fewer == size
        places = places.masked_fill(fits, fewer)
    places = places.masked_fill(size >= FRACTIONS_BELOW, 0)
    units = size.round()
    for more in range(1, PLACES_SHOWN + 1):
        units = torch.where(places == more, (size * 10.0**more).round(), units)
    units, digits = units.long(), torch.ones_like(places)
    for count in range(1, 16):
        digits = torch.where(units >= 10**count, count + 1, digits)
    digits = digits.maximum(places + 1)

    minus = (values < 0).long()
    found = []
    for place in range(LONGEST_NUMERAL):
        at = place - minus  # in the numeral without a sign
        point = digits - places  # where the point is, if there is one
        behind = digits - 1 - at + (at > point).long()  # digits behind this one
        digit = torch.div(units, torch.pow(10, behind.clamp(0, 15)), rounding_mode="floor") % 10
        code = digit.masked_fill((at == point) & (places > 0), POINT).masked_fill(at < 0, MINUS_SIGN)
        length = digits + (places > 0).long()
        found.append(code.masked_fill((at >= length) | ~shown, -1))
    return torch.stack(found, -1)


def shown_ids(ids: Tensor, values: Tensor, num_token_id: int, rows: Tensor) -> Tensor:
    """ids [...] with each number's first character in place of `<NUM>`, if it has one. rows: of `CHARACTERS`."""
    first = characters(values)[..., 0]
    return torch.where((ids == num_token_id) & (first >= 0), rows[first.clamp(min=0)], ids)


def next_character(is_number: Tensor, values: Tensor, last: Tensor) -> Tensor:
    """The characters that follow texts inside a numeral [R] int64: places in `CHARACTERS`; -1 where none has to follow.

    is_number [R,T] bool, values [R,T] float64: of the texts. last [R] or [1]: their last position; later ones are not
    read.
    """
    places = torch.arange(values.shape[1], device=values.device)
    at = places.where(is_number & (places <= last.unsqueeze(-1)), -1).amax(1)  # of the last number
    numeral = characters(values.gather(1, at.clamp(min=0).unsqueeze(1))[:, 0])
    behind = last - at + 1  # characters of it so far
    found = numeral.gather(1, behind.clamp(max=LONGEST_NUMERAL - 1).unsqueeze(1))[:, 0]
    return found.masked_fill((at < 0) | (behind >= LONGEST_NUMERAL), -1)


def given_digits(is_number: Tensor, values: Tensor) -> Tensor:
    """Whether each position [B,T] is one of the characters behind a number. Arguments [B,T] as `next_character`."""
    places = torch.arange(values.shape[1], device=values.device)
    lengths = (characters(values) >= 0).sum(-1).clamp(min=1)
    return (places < (places + lengths).where(is_number, 0).cummax(1).values) & ~is_number
