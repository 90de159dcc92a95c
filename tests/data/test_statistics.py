"""Quartiles are numpy's to the last digit, whatever the order and the parts."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cqwen_dist.heads.targets import NumericStatistics, numeric_statistics


def _oracle(values: np.ndarray) -> NumericStatistics:
    """As the definition reads."""
    if not values.size:
        return NumericStatistics(0.0, 1.0, 0)
    spreads = []
    for read in (values, np.sign(values) * np.log1p(np.abs(values))):
        low, median, high = (float(q) for q in np.quantile(read, (0.25, 0.5, 0.75)))
        scale = high / 2 - low / 2
        if scale <= 1e-12 * abs(median):
            scale = float(np.mean(np.abs(read / 2 - median / 2)))
        spreads.append((median, scale if scale > 1e-12 * abs(median) else 1.0))
    return NumericStatistics(*spreads[0], values.size, *spreads[1])


DRAWS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda g, n: g.normal(5, 3, n),
    "cauchy": lambda g, n: g.standard_cauchy(n),
    "lognormal": lambda g, n: g.lognormal(3, 4, n),
    "few integers": lambda g, n: g.integers(0, 40, n).astype(float),
    "sorted": lambda g, n: np.sort(g.normal(size=n)),
    "one value and others": lambda g, n: np.where(g.random(n) < 0.9, 7.0, g.normal(size=n)),
    "equal": lambda g, n: np.full(n, 3.5),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("count", [200_003, 200_002])
def test_statistics_in_parts_are_exact(name: str, count: int) -> None:
    values = DRAWS[name](np.random.default_rng(len(name)), count)
    found, meant = numeric_statistics(np.array_split(values, 7)), _oracle(values)
    assert (found.median, found.count, found.log_median) == (meant.median, meant.count, meant.log_median)
    # A mean distance is summed in another order
    assert found.scale == pytest.approx(meant.scale, rel=1e-13)
    assert found.log_scale == pytest.approx(meant.log_scale, rel=1e-13)


@settings(max_examples=60)
@given(st.lists(st.floats(-1e300, 1e300), max_size=40), st.integers(1, 5))
def test_statistics_of_few_numbers_and_empty_parts(values: list[float], parts: int) -> None:
    found, meant = numeric_statistics(np.array_split(values, parts)), _oracle(np.array(values))
    assert found.count == meant.count
    assert found.median == pytest.approx(meant.median, rel=0, abs=1e-320)  # half of a subnormal number loses a bit
    assert found.scale == pytest.approx(meant.scale, rel=1e-13)
