"""Streamed quartiles are numpy's to the last digit, whatever the order, the parts and the number of ranks."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cqwen_dist.data.statistics import NumericStatistics, numeric_statistics


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


def _on_ranks(values: np.ndarray, world: int, parts: int) -> NumericStatistics:
    """The statistics on `world` threads that gather as ranks do."""
    pieces = np.array_split(values, parts)
    barrier, table, found = threading.Barrier(world), [None] * world, [None] * world

    def work(rank: int) -> None:
        def gather(own: Any) -> list[Any]:
            barrier.wait()
            table[rank] = own
            barrier.wait()
            return list(table)

        found[rank] = numeric_statistics(lambda: pieces[rank::world], gather)  # type: ignore[call-overload]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(own == found[0] for own in found)
    return found[0]  # type: ignore[return-value]


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
@pytest.mark.parametrize(("count", "world", "parts"), [(200_003, 1, 7), (200_002, 3, 10)])
def test_streamed_statistics_are_exact(name: str, count: int, world: int, parts: int) -> None:
    values = DRAWS[name](np.random.default_rng(len(name)), count)
    found, meant = _on_ranks(values, world, parts), _oracle(values)
    assert (found.median, found.count) == (meant.median, meant.count)
    assert found.log_median == meant.log_median
    # A mean distance is summed in parts.
    exact = name not in ("one value and others",)
    assert found.scale == (meant.scale if exact else pytest.approx(meant.scale, rel=1e-13))
    assert found.log_scale == (meant.log_scale if exact else pytest.approx(meant.log_scale, rel=1e-13))


@settings(max_examples=60)
@given(st.lists(st.floats(-1e300, 1e300), max_size=40), st.integers(1, 5))
def test_statistics_of_few_numbers_and_empty_shares(values: list[float], parts: int) -> None:
    found, meant = _on_ranks(np.array(values), 2, parts), _oracle(np.array(values))
    assert found.count == meant.count
    assert found.median == pytest.approx(meant.median, rel=0, abs=1e-320)  # half of a subnormal number loses a bit
    assert found.scale == pytest.approx(meant.scale, rel=1e-13)


@pytest.mark.slow
def test_quartiles_of_a_hundred_million_numbers_are_exact() -> None:
    """Median and IQR/2 of 1e8 numbers, made again part by part: 1 % was asked for."""

    def parts() -> Any:
        return (np.random.default_rng(seed).lognormal(3, 2, 1_000_000) for seed in range(100))

    found = numeric_statistics(parts)
    assert found.count == 10**8
    low, median, high = (np.exp(3 + 2 * z) for z in (-0.6744897501960817, 0.0, 0.6744897501960817))
    assert found.median == pytest.approx(median, rel=1e-3)
    assert found.scale == pytest.approx((high - low) / 2, rel=1e-3)
