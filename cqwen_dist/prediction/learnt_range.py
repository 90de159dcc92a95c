"""Ranges of the training numbers. A row far outside is marked, and its prediction is limited."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cqwen_dist.data.cells import as_number
from cqwen_dist.heads.intervals import LEVELS
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.prediction.differences import beyond

OUTSIDE = "outside"  # the added column: names of columns with a number outside
MARGIN = 0.25  # in ranges beyond either end: still inside; predictions are limited here
REACH = 1.0  # in ranges beyond either end: intervals are limited here
DIGITS = 10  # of a limited prediction


@dataclass(frozen=True)
class LearntRange:
    """Minimum and maximum of every training column, including the target."""

    target: str
    ends: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, columns: Mapping[str, Mapping[str, Any]], target: str) -> LearntRange | None:
        """From a run's columns (`data.columns.described`); None if the target's range is unknown."""
        ends = {name: (column["low"], column["high"]) for name, column in columns.items() if "low" in column}
        return cls(target, ends) if target in ends else None

    def held(self, cells: Mapping[str, str], found: Mapping[str, Any], unit: TargetTransform) -> dict[str, Any]:
        """Adds OUTSIDE to `found`, a row's new columns: the names of the row's numbers that are outside.

        The prediction is limited to the target's range plus MARGIN. If anything is outside, the intervals move with the
        prediction and grow by the distance to the range, in units of that range, but not beyond the range plus REACH.
        Nothing goes below 0 if no target did. cells: the row as training reads it. unit: of the target's
        range.
        """
        if found["predicted"] is None:
            return {**found, OUTSIDE: None}
        low, high = (_forward(unit, end) for end in self.ends[self.target])
        value = _forward(unit, found["predicted"])
        numbers = {name: as_number(cells.get(name)) for name in self.ends}
        far = {name: beyond(numbers[name], *ends) for name, ends in self.ends.items()}
        far[self.target] = beyond(value, low, high)
        outside = [name for name, distance in far.items() if distance > MARGIN]
        if not outside:
            return {**found, OUTSIDE: ""}
        width = high - low
        at = min(max(value, low - MARGIN * width), high + MARGIN * width)
        growth = 1 + max(far[name] for name in outside)
        new = {"predicted": at}
        for level in LEVELS:
            for name, side in ((f"low_{level * 100:g}", -1), (f"high_{level * 100:g}", 1)):
                reach = max(growth * abs(_forward(unit, found[name]) - value), abs(value - at))
                new[name] = min(max(at + side * reach, low - REACH * width), high + REACH * width)
        raw = unit.inverse(torch.tensor([*new.values()], dtype=torch.float64)).tolist()
        least = 0.0 if self.ends[self.target][0] >= 0 else -math.inf
        held = {name: max(float(f"{number:.{DIGITS}g}"), least) for name, number in zip(new, raw, strict=True)}
        return {**found, **held, OUTSIDE: ", ".join(outside)}


def _forward(unit: TargetTransform, value: float) -> float:
    return float(unit.forward(torch.tensor(value, dtype=torch.float64)))
