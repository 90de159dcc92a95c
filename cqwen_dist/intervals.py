"""How wide an interval around a predicted number is: a Cauchy's own quantiles, or factors measured on held-out numbers.

A Cauchy fitted to light-tailed errors is too wide at 90 %. Split conformal prediction mends that with one number a
level: of n held-out numbers, the ceil((n + 1) level)-th smallest |t - loc_Y| / scale_Y, in the unit of the targets
(Lei et al. 2018, "Distribution-free predictive inference for regression", with scale_Y as the local spread).

`calibration.json`, in a run's folder and beside an exported model: {"levels": {"0.5": f, "0.9": f, "0.95": f}, "n": n}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "calibration.json"
LEVELS = (0.5, 0.9, 0.95)


@dataclass(frozen=True)
class Intervals:
    """Half-widths of central intervals in scales of Y; levels that were not measured are the Cauchy's own.

    factors: level -> half-width in scales. n: the held-out numbers they were measured on; 0 without any.
    """

    factors: Mapping[float, float] = field(default_factory=dict)
    n: int = 0

    def half_width(self, level: float) -> float:
        """In scales: the interval is loc_Y -+ this times scale_Y. Raises ValueError unless 0 < level < 1."""
        if not 0.0 < level < 1.0:
            raise ValueError(f"level must be between 0 and 1, found {level}")
        measured = next((f for known, f in self.factors.items() if math.isclose(known, level)), None)
        return math.tan(math.pi * level / 2) if measured is None else measured

    def measured(self, level: float) -> bool:
        """Whether held-out numbers set this level."""
        return any(math.isclose(known, level) for known in self.factors)

    @classmethod
    def measure(cls, scores: Sequence[float], levels: Sequence[float] = LEVELS) -> Intervals:
        """From held-out |t - loc_Y| / scale_Y. A level that n numbers cannot hold (n < level/(1-level)) is left out."""
        ordered, n = sorted(scores), len(scores)
        at = {level: math.ceil((n + 1) * level - 1e-9) for level in levels}
        return cls({level: float(ordered[rank - 1]) for level, rank in at.items() if rank <= n}, n)

    def to_dict(self) -> dict[str, Any]:
        """As `calibration.json` holds it."""
        return {"levels": {f"{level:g}": f for level, f in self.factors.items()}, "n": self.n}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> Intervals:
        """Of `to_dict`'s; none of None. Raises ValueError for levels or factors out of range."""
        if data is None:
            return cls()
        factors = {float(level): float(f) for level, f in data["levels"].items()}
        if any(not 0.0 < level < 1.0 or not (f >= 0.0 and math.isfinite(f)) for level, f in factors.items()):
            raise ValueError(f"levels between 0 and 1 with factors >= 0, found {dict(data['levels'])}")
        return cls(factors, int(data.get("n", 0)))


def read_intervals(folder: Path) -> Intervals:
    """Those of a folder's `calibration.json`; none where there is no such file. Raises ValueError where it is broken."""
    path = folder / FILE
    if not path.is_file():
        return Intervals()
    try:
        return Intervals.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
