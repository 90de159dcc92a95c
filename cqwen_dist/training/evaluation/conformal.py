"""Split-conformal recalibration of the Cauchy's own intervals (Vovk; Lei et al. 2018).

Intervals of a Cauchy that is fitted to light-tailed residuals are too wide. A calibration part of the held-out numbers
gives the scores r_i = |t_i - loc_i| / scale_i, in the target's unit, in which Y is Cauchy. With q, the
ceil((n+1) level)-th smallest score, loc +- q scale contains a new number of the same kind with probability >= level,
whatever the model. The factor of a level is q over the Cauchy's own half-width tan(pi level/2), so every interval is
loc +- factor tan(pi level/2) scale; raw intervals have factor 1. The target's unit is monotone in the raw one, so the
ends can be mapped back.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cqwen_dist.intervals import LEVELS

CALIBRATION = "calibration"  # key of the factors in a checkpoint's metrics


def half_width(level: float) -> float:
    """Scales from the median to the end of a Cauchy's central interval of `level`: tan(pi level/2)."""
    return math.tan(0.5 * math.pi * level)


def for_calibration(texts: np.ndarray) -> np.ndarray:
    """[n] bool: which held-out texts [n] int (numbered in the data's order) calibrate; the others measure.

    The top bit of a golden-ratio hash of the number: about half, evenly spread, the same on any number of ranks. By
    text, as the numbers of one text are not independent. Not by parity, as data may alternate.
    """
    return (texts.astype(np.uint64) * np.uint64(2654435769) & np.uint64(0xFFFFFFFF)) >> np.uint64(31) == 1


@dataclass(frozen=True)
class IntervalFactors:
    """levels: the factor of the Cauchy's half-width by level ("0.9"); n: the numbers they were measured on.

    A level that n numbers cannot guarantee (ceil((n+1) level) > n) is left out.
    """

    levels: dict[str, float]
    n: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> IntervalFactors:
        """From what `to_dict` returned."""
        return cls({str(level): float(factor) for level, factor in data["levels"].items()}, int(data["n"]))


def interval_factors(scores: np.ndarray, levels: tuple[float, ...] = LEVELS) -> IntervalFactors:
    """Factors from the calibration part's scores [n] = |t - loc| / scale, >= 0."""
    ordered, found = np.sort(scores), {}
    for level in levels:
        rank = math.ceil((len(ordered) + 1) * level - 1e-9)
        if 1 <= rank <= len(ordered):
            found[f"{level:g}"] = float(ordered[rank - 1]) / half_width(level)
    return IntervalFactors(found, len(ordered))
