"""The unit of the regression: maps raw numbers to targets of the loss, and predictions back to numbers.

The loss uses targets; metrics and generated numbers are in the raw unit. Values are stored in float64 and enter the
loss as fp32 targets (bf16 is exact only up to 256).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

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

    Raises ValueError for an unknown name, a median that is not finite, or a scale that is not finite and > 0.
    """

    name: str = "none"
    median: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"target transform {self.name!r}: one of {', '.join(NAMES)}")
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
