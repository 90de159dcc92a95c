"""However a text is made, numbers are found in time that grows as its length does."""

import time
from itertools import product
from random import Random

import pytest
from support.corpora import find_left

from cqwen_dist.config import NumberPolicy
from cqwen_dist.data.numbers import find_numbers

_RANDOM = Random(0)
SMALL, TIMES = 4096, 8
# What is repeated, and what stands behind the last of it, where a pattern that hopes for it would look.
FAMILIES = {
    "rows of integers": (" ".join(str(_RANDOM.randint(100, 999)) for _ in range(512)) + " ", ""),
    "groups": ("123 ", "x"),
    "groups, zero, comma": ("123 ", "045,6"),
    "thin groups": ("123\u2009", "456:7"),
    "comma groups": ("123,", "45"),
    "commas": ("1,", ""),
    "digits": ("1", ""),
    "decimals": ("1.5 ", ""),
    "dots": ("1.", "1"),
    "letters": ("a", "1"),
    "digits then letters": ("1", "a" * 9000),
    "products": ("1x", "1"),
    "signed exponents": ("1e-1", "x"),
    "hexadecimal": ("0x", "1"),
    "minus": ("-", "5"),
    "spaces and minus": (" ", "-5"),
    "numeral, spaces": ("2024-01-31" + " " * 50, "= 5"),
    "slashes": ("1/", "1"),
    "dates glued": ("2024-01-31T", ""),
    "times with seconds": ("12:30:45.5", ""),
    "phones": ("138 1234 ", "5678"),
    "open brackets": ("(", "5)"),
    "uuids": ("550e8400-e29b-41d4-a716-446655440000 ", "5"),
    "years": ("2024年", "1月"),
    "combining": ("e\u0301", "1"),
}


def _text(family: str, size: int) -> str:
    unit, end = FAMILIES[family]
    return (unit * (size // len(unit) + 1))[:size] + end


def _seconds(text: str, policy: NumberPolicy) -> float:
    began = time.process_time()
    find_numbers(text, policy)
    find_left(text, policy)
    return time.process_time() - began


def test_reading_time_is_linear_in_the_text() -> None:
    all_of = NumberPolicy(accounting=True, dates=True, identifiers=True, leading_zeros=True)
    for family, policy in product(FAMILIES, (NumberPolicy(), all_of)):
        small, large = _text(family, SMALL), _text(family, SMALL * TIMES)
        for _ in range(4):  # the machine may have been busy: linear once is linear
            once, more = min(_seconds(small, policy) for _ in range(2)), _seconds(large, policy)
            if more < 2.5 * TIMES * once + 0.01:
                break
        else:
            pytest.fail(f"{family}: {len(small)} characters took {once:.3f} s, {len(large)} took {more:.3f} s")
