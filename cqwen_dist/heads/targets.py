"""The unit of the regression: maps raw numbers to targets of the loss, and predictions back to numbers. And a number's
law in this unit.

The loss uses targets; metrics and generated numbers are in the raw unit. Values are stored in float64 and enter the
loss as fp32 targets (bf16 is exact only up to 256).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from cqwen_dist.config.shape import CONSTANTS
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.number_laws import LAWS

NAMES = ("standardise", "none", "signed_log", "standardise_log")
# Targets are clamped to this limit: far beyond any use, and still safe in the fp32 loss.
TARGET_LIMIT = 1e30
# expm1 of more than this is infinite in float64.
_LOG_LIMIT = 709.0


@dataclass(frozen=True)
class TargetTransform:
    """A monotone map between raw numbers and the regression's targets.

    - ``standardise``: t = (v - median) / scale, with the data's median and IQR/2 (seed S1 2): affine, so a
      Cauchy stays a Cauchy.
    - ``none``: t = v (the seeds).
    - ``signed_log``: t = sign(v) ln(1 + |v|), as at the input (seed S0 1.3); median and scale are not used.
    - ``standardise_log``: t = (sign(v) ln(1 + |v|) - median) / scale, with median and IQR/2 of the logarithms: for
      numbers of very different sizes, so that errors count relative to the number.

    law: of Y, whose location and scale are in this unit (`ops.number_laws.LAWS`).

    Raises ValueError for an unknown name or law, a median that is not finite, or a scale that is not finite and > 0.
    """

    name: str = "none"
    median: float = 0.0
    scale: float = 1.0
    law: str = "cauchy"

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"target transform {self.name!r}: one of {', '.join(NAMES)}")
        if self.law not in LAWS:
            raise ValueError(f"law {self.law!r}: one of {', '.join(LAWS)}")
        if not math.isfinite(self.median) or not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"median {self.median} and scale {self.scale}: finite, and scale > 0")

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Raw numbers to targets, computed in float64.

        Args: values [...] of any float dtype (float64 keeps integers above 2^24).
        Returns: [...] fp32, finite for finite input (clamped to +-TARGET_LIMIT).
        """
        raw = values.double() if self.linear else values.double().sign() * values.double().abs().log1p()
        median, scale = self._unit
        return ((raw - median) / scale).clamp(-TARGET_LIMIT, TARGET_LIMIT).float()

    def inverse(self, targets: torch.Tensor) -> torch.Tensor:
        """Targets (predicted locations, or quantiles: the map is monotone) to raw numbers.

        Args: targets [...] of any float dtype. Returns: [...] float64, finite for finite input.
        """
        median, scale = self._unit
        raw = targets.double() * scale + median
        return raw if self.linear else raw.sign() * raw.abs().clamp(max=_LOG_LIMIT).expm1()

    @property
    def kind(self) -> type[Cauchy]:
        """The class of Y's law."""
        return LAWS[self.law]

    @property
    def linear(self) -> bool:
        """Whether scales can be converted to the raw unit (`inverse_scale`)."""
        return self.name in ("standardise", "none")

    @property
    def _unit(self) -> tuple[float, float]:
        """(median, scale) if the transform uses them, otherwise (0, 1)."""
        return (self.median, self.scale) if self.name.startswith("standardise") else (0.0, 1.0)

    def inverse_scale(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales of targets to scales in the raw unit.

        Args: scales [...] of any float dtype. Returns: [...] float64.
        Raises: ValueError for logarithms, as the raw law is not a Cauchy; map quantiles by `inverse` instead.
        """
        if not self.linear:
            raise ValueError(f"{self.name} is not linear: a scale has no raw unit; map quantiles by inverse()")
        return scales.double() * self._unit[1]


_QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class NumericStatistics:
    """Location and scale of the targets in their raw unit. Without targets: count 0, median 0, scale 1.

    They are median and IQR/2, never mean and deviation (seed S1 2): for a Cauchy distribution the interquartile range
    is twice the scale, and a few extreme numbers change neither statistic.
    """

    median: float
    scale: float
    count: int
    log_median: float = 0.0  # like log_scale, for sign(v) ln(1 + |v|)
    log_scale: float = 1.0
    common: tuple[float, ...] = ()  # the `CONSTANTS` commonest numbers, the commonest first

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
    always. The quartiles are exact: one rank holds all numbers, 8 bytes each and some copies, and tells the others.
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
    return NumericStatistics(*spreads[0], count, *spreads[1], commonest(values))


def commonest(values: np.ndarray) -> tuple[float, ...]:
    """The `CONSTANTS` commonest of some numbers, the commonest first; equally common ones in order of size."""
    found, counts = np.unique(values, return_counts=True)
    return tuple(map(float, found[np.argsort(-counts, kind="stable")][:CONSTANTS]))


def signed_log(values: np.ndarray) -> np.ndarray:
    """sign(v) ln(1 + |v|), the unit standardise_log (S1 2)."""
    return np.sign(values) * np.log1p(np.abs(values))
