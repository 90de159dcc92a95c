"""The unit of the numbers that are learnt: median and IQR/2, never mean and deviation (seed S1 2).

For a Cauchy the interquartile range is twice the scale, and neither statistic minds a few extreme numbers.

Many numbers are streamed twice. A KLL sketch (Karnin, Lang and Liberty 2016; of the library `datasketches`), merged
over ranks, says between which values a quantile lies; the second time the few numbers in between are kept and the
others counted. So the result is exact, the same on any number of ranks, and takes memory for some thousandths of the
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cqwen_dist.targets import TargetTransform

# Numbers that are looked at again and again: one pass over each array.
Parts = Callable[[], Iterable[np.ndarray]]
# What every rank has, in the order of ranks.
Gather = Callable[[Any], Sequence[Any]]

_QUARTILES = (0.25, 0.5, 0.75)
_SKETCH_SIZE = 2048  # k: 48 KB, ranks right to 0.12 %
_MARGIN = 4.0  # of the sketch's 99 % bound
_HELD = 1 << 21  # values inside a window before equal ones are put together


@dataclass(frozen=True)
class NumericStatistics:
    """Location and scale of the targets in their raw unit; count 0: there were none (median 0, scale 1).

    log_median, log_scale: the same of sign(v) ln(1 + |v|).
    """

    median: float
    scale: float
    count: int
    log_median: float = 0.0
    log_scale: float = 1.0

    def transform(self, name: str) -> TargetTransform:
        """The target transform of this name in this unit."""
        if name == "standardise_log":
            return TargetTransform(name, self.log_median, self.log_scale)
        return TargetTransform(name, self.median, self.scale)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def numeric_statistics(values: np.ndarray) -> NumericStatistics:
    """Median and IQR/2 of target values.

    Args: values [M], of any order, finite. Computed in float64, the median being the mean of the middle two
    (`torch.median` takes the lower). Where more than half of the values are equal the IQR is 0 and half the mean
    distance from the median stands in; constant data has scale 1. So scale > 0 always.
    """
    values = np.asarray(values, dtype=np.float64)
    if not values.size:
        return NumericStatistics(0.0, 1.0, 0)

    def mean_distance(read: Callable[[np.ndarray], np.ndarray], median: float) -> float:
        return float(np.mean(np.abs(read(values) / 2 - median / 2)))

    spreads = []
    for read in (_raw, _logarithms):
        low, median, high = (float(q) for q in np.quantile(read(values), _QUARTILES))
        spreads.append(_spread(low, median, high, read, mean_distance))
    return NumericStatistics(spreads[0][0], spreads[0][1], int(values.size), *spreads[1])


def streamed_statistics(parts: Parts, gather: Gather) -> NumericStatistics:
    """The same of numbers that are too many to hold: `parts` gives this rank's, part by part, as often as asked."""
    count, found = _order_statistics(parts, gather)
    if not count:
        return NumericStatistics(0.0, 1.0, 0)

    def mean_distance(read: Callable[[np.ndarray], np.ndarray], median: float) -> float:
        sums = [float(np.abs(read(part) / 2 - median / 2).sum()) for part in parts()]
        return math.fsum(s for own in gather(sums) for s in own) / count  # the same in any order

    spreads = []
    for read in (_raw, _logarithms):
        low, median, high = (_between(read(np.array([a, b])), share) for a, b, share in found)
        spreads.append(_spread(low, median, high, read, mean_distance))
    return NumericStatistics(spreads[0][0], spreads[0][1], count, *spreads[1])


def _order_statistics(parts: Parts, gather: Gather) -> tuple[int, list[tuple[float, float, float]]]:
    """How many numbers there are, and for each quartile its two neighbours and the share of the second."""
    from datasketches import kll_doubles_sketch

    own = kll_doubles_sketch(_SKETCH_SIZE)
    for part in parts():
        own.update(np.array(part))  # it takes no array that is read-only
    merged = kll_doubles_sketch(_SKETCH_SIZE)
    for data in gather(own.serialize()):
        merged.merge(kll_doubles_sketch.deserialize(data))
    count = int(merged.n)
    if not count:
        return 0, []
    at = [(count - 1) * q for q in _QUARTILES]
    ranks = [(math.floor(h), math.ceil(h)) for h in at]
    margin = _MARGIN * merged.normalized_rank_error(False) + 1.0 / count
    while True:
        # Merging draws lots: the windows of rank 0 are everybody's.
        windows = gather([_window(merged, q, margin) for q in _QUARTILES])[0]
        below, inside = _counted(parts, windows, gather)
        found: list[tuple[float, float, float]] = []
        for h, pair, under, values in zip(at, ranks, below, inside, strict=True):
            a, b = (_of_rank(rank - under, *values) for rank in pair)
            if a is not None and b is not None:
                found.append((a, b, h - math.floor(h)))
        if len(found) == len(_QUARTILES):
            return count, found
        margin *= 4  # one time in millions


def _window(sketch: Any, q: float, margin: float) -> tuple[float, float]:
    low = sketch.get_quantile(q - margin) if q > margin else -math.inf
    high = sketch.get_quantile(q + margin) if q + margin < 1 else math.inf
    return low, high


def _counted(
    parts: Parts, windows: list[tuple[float, float]], gather: Gather
) -> tuple[list[int], list[tuple[np.ndarray, np.ndarray]]]:
    """For each window: how many numbers lie below it, and the different values in it with how often each occurs."""
    below = [0] * len(windows)
    held: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in windows]
    for part in parts():
        for j, (low, high) in enumerate(windows):
            below[j] += int((part < low).sum())
            held[j].append(np.unique(part[(part >= low) & (part <= high)], return_counts=True))
            if sum(len(values) for values, _ in held[j]) > _HELD:
                held[j] = [_together(held[j])]
    inside = [_together([(np.zeros(0), np.zeros(0, np.int64)), *own]) for own in held]
    everyone = gather((below, inside))
    return (
        [sum(own[0][j] for own in everyone) for j in range(len(windows))],
        [_together([own[1][j] for own in everyone]) for j in range(len(windows))],
    )


def _together(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    values, where = np.unique(np.concatenate([part[0] for part in parts]), return_inverse=True)
    counts = np.zeros(len(values), np.int64)
    np.add.at(counts, where, np.concatenate([part[1] for part in parts]))
    return values, counts


def _of_rank(rank: int, values: np.ndarray, counts: np.ndarray) -> float | None:
    """The value of this rank among them; None where it lies outside."""
    index = int(np.searchsorted(counts.cumsum(), rank, "right"))
    return float(values[index]) if rank >= 0 and index < len(values) else None


def _between(pair: np.ndarray, share: float) -> float:
    """As np.quantile interpolates."""
    width = pair[1] - pair[0]
    return float(pair[0] + width * share if share < 0.5 else pair[1] - width * (1 - share))


def _raw(values: np.ndarray) -> np.ndarray:
    return values


def _logarithms(values: np.ndarray) -> np.ndarray:
    return np.sign(values) * np.log1p(np.abs(values))


def _spread(
    low: float,
    median: float,
    high: float,
    read: Callable[[np.ndarray], np.ndarray],
    mean_distance: Callable[[Callable[[np.ndarray], np.ndarray], float], float],
) -> tuple[float, float]:
    """(median, IQR/2 or what stands in for it)."""
    scale = high / 2 - low / 2
    # What rounding alone makes of equal numbers is no spread.
    if scale <= 1e-12 * abs(median):
        scale = mean_distance(read, median)
    if scale <= 1e-12 * abs(median):
        scale = 1.0
    return median, scale
