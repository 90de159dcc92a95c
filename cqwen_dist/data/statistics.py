"""The targets' unit: median and IQR/2, never mean and deviation (seed S1 2).

For a Cauchy distribution the interquartile range is twice the scale, and a few extreme numbers change neither
statistic.

The quartiles are exact: one rank holds all numbers, 8 bytes each and some copies, and tells the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cqwen_dist.heads.targets import TargetTransform

_QUARTILES = (0.25, 0.5, 0.75)


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


def numeric_statistics(parts: Iterable[np.ndarray]) -> NumericStatistics:
    """Median and IQR/2 of finite numbers, which come in parts of float64.

    The median is the mean of the middle two (`torch.median` takes the lower). If more than half of the numbers are
    equal, the IQR is 0, and half the mean distance from the median replaces it. Constant data has scale 1. So scale > 0
    always.
    """
    values = np.concatenate([np.zeros(0), *parts]) + 0.0  # -0.0 is 0.0
    count = len(values)
    if not count:
        return NumericStatistics(0.0, 1.0, 0)
    spreads = []
    for numbers in (values, signed_log(values)):
        # Work with halves: the difference of the largest float64 numbers overflows
        low, median, high = (2 * float(half) for half in np.quantile(numbers / 2, _QUARTILES, overwrite_input=True))
        scale = high / 2 - low / 2
        if scale <= 1e-12 * abs(median):  # equal up to rounding
            scale = float(np.abs(numbers / 2 - median / 2).mean())
        spreads.append((median, scale if scale > 1e-12 * abs(median) else 1.0))
    return NumericStatistics(*spreads[0], count, *spreads[1])


def signed_log(values: np.ndarray) -> np.ndarray:
    """sign(v) ln(1 + |v|), the unit standardise_log (S1 2)."""
    return np.sign(values) * np.log1p(np.abs(values))
