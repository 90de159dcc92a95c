"""The targets' unit: median and IQR/2, never mean and deviation (seed S1 2).

For a Cauchy distribution the interquartile range is twice the scale, and a few extreme numbers change neither
statistic.

The numbers may not fit in memory and are spread over ranks, so quartiles are found by counting. float64 bits, suitably
flipped, sort as unsigned integers in numeric order. Each pass over the numbers gives 8 more bits of the quartiles. The
result is exact and equal on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cqwen_dist.heads.targets import TargetTransform

# Returns float64 arrays; each call starts a pass over the data.
Parts = Callable[[], Iterable[np.ndarray]]
# All-gather: takes this rank's value, returns all values by rank.
Gather = Callable[[Any], Sequence[Any]]

_QUARTILES = (0.25, 0.5, 0.75)
_DIGIT = 8  # bits per pass; more would make messages large on many ranks
_MASK = (1 << _DIGIT) - 1
_SIGN = 1 << 63
_SLICE = 1 << 17  # numbers per slice, so that temporaries stay in the CPU cache


@dataclass(frozen=True)
class NumericStatistics:
    """Location and scale of the targets in their raw unit. Without targets: count 0, median 0, scale 1."""

    median: float
    scale: float
    count: int
    log_median: float = 0.0  # like log_scale, for sign(v) ln(1 + |v|)
    log_scale: float = 1.0

    def transform(self, name: str) -> TargetTransform:
        """Target transform `name` with this location and scale."""
        if name == "standardise_log":
            return TargetTransform(name, self.log_median, self.log_scale)
        return TargetTransform(name, self.median, self.scale)

    def scale_of(self, name: str) -> float:
        """IQR/2 of the targets in the unit of this transform."""
        return {"none": self.scale, "signed_log": self.log_scale}.get(name, 1.0)


def numeric_statistics(parts: Parts, gather: Gather = lambda own: [own]) -> NumericStatistics:
    """Median and IQR/2 of finite numbers. Collective: all ranks call this.

    parts: this rank's numbers, read again in each pass. Computed in float64. The median is the mean of the middle two
    (`torch.median` takes the lower). If more than half of the numbers are equal, the IQR is 0, and half the mean
    distance from the median replaces it. Constant data has scale 1. So scale > 0 always.
    """
    count = sum(gather(sum(len(part) for part in parts())))
    if not count:
        return NumericStatistics(0.0, 1.0, 0)
    # Like np.quantile, interpolate between the two numbers around each quartile's position.
    places = [(count - 1) * quartile for quartile in _QUARTILES]
    number = _of_ranks({rank for place in places for rank in (math.floor(place), math.ceil(place))}, parts, gather)
    pairs = [np.array([number[math.floor(place)], number[math.ceil(place)]]) for place in places]
    spreads = []
    for read in (np.asarray, signed_log):
        ends = zip(pairs, places, strict=True)
        # Work with halves: the difference of the largest float64 numbers overflows
        low, median, high = (2 * float(np.quantile(read(pair) / 2, place % 1)) for pair, place in ends)
        scale = high / 2 - low / 2
        if scale <= 1e-12 * abs(median):  # equal up to rounding
            sums = [float(np.abs(read(part) / 2 - median / 2).sum()) for part in parts()]
            scale = math.fsum(s for own in gather(sums) for s in own) / count  # fsum: equal in any order
        spreads.append((median, scale if scale > 1e-12 * abs(median) else 1.0))
    return NumericStatistics(*spreads[0], count, *spreads[1])


def _of_ranks(ranks: set[int], parts: Parts, gather: Gather) -> dict[int, float]:
    """The numbers with these ranks in ascending order (0: the smallest): a radix search, highest bits first."""
    leading = dict.fromkeys(ranks, 0)  # rank -> leading bits found so far
    inside = {rank: rank for rank in ranks}  # rank -> rank among numbers with the same leading bits
    for shift in range(64 - _DIGIT, -1, -_DIGIT):
        counts = {bits: np.zeros(1 << _DIGIT, np.int64) for bits in leading.values()}
        for part in parts():
            for start in range(0, len(part), _SLICE):
                keys = _sortable(part[start : start + _SLICE]) >> shift
                heads = keys >> _DIGIT
                for bits, count in counts.items():
                    count += np.bincount((keys[heads == bits] & _MASK).view(np.int64), minlength=len(count))
        # All-gather of at most six histograms with 256 counts each, however large the data is.
        everyone = gather(counts)
        for rank, bits in leading.items():
            ends = np.sum([own[bits] for own in everyone], 0).cumsum()
            # The bin where the cumulative count passes the rank gives the next 8 bits.
            digit = int(np.searchsorted(ends, inside[rank], "right"))
            inside[rank] -= int(ends[digit - 1]) if digit else 0
            leading[rank] = bits << _DIGIT | digit
    return {rank: _number(bits) for rank, bits in leading.items()}


def _sortable(values: np.ndarray) -> np.ndarray:
    """[M] uint64 that sort like the float64 values: flips all bits of negative numbers, else only the sign bit."""
    bits = (values + 0.0).view(np.int64)  # + 0.0 turns -0.0 into 0.0
    return (bits ^ (bits >> 63 | np.iinfo(np.int64).min)).view(np.uint64)


def _number(bits: int) -> float:
    """The float64 for a sortable integer."""
    return float(np.uint64(bits ^ _SIGN if bits & _SIGN else bits ^ (2**64 - 1)).view(np.float64))


def signed_log(values: np.ndarray) -> np.ndarray:
    """sign(v) ln(1 + |v|), the unit standardise_log (S1 2)."""
    return np.sign(values) * np.log1p(np.abs(values))
