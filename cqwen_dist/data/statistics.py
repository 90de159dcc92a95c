"""The unit of the numbers that are learnt: median and IQR/2, never mean and deviation (seed S1 2).

For a Cauchy the interquartile range is twice the scale, and neither statistic minds a few extreme numbers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cqwen_dist.targets import TargetTransform


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
    logarithms = np.sign(values) * np.log1p(np.abs(values))
    return NumericStatistics(*_spread(values), int(values.size), *_spread(logarithms))


def _spread(values: np.ndarray) -> tuple[float, float]:
    """(median, IQR/2 or what stands in for it)."""
    low, median, high = (float(q) for q in np.quantile(values, [0.25, 0.5, 0.75]))
    scale = high / 2 - low / 2
    # What rounding alone makes of equal numbers is no spread.
    if scale <= 1e-12 * abs(median):
        scale = float(np.mean(np.abs(values / 2 - median / 2)))
    if scale <= 1e-12 * abs(median):
        scale = 1.0
    return median, scale
