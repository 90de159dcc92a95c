"""Predictions far outside of what was learnt are held, widened and marked; all others stay as they are."""

import math

import pytest

from cqwen_dist.heads.intervals import LEVELS
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.prediction.learnt_table import OUTSIDE, LearntRange

KNOWN = LearntRange("price", {"price": (10.0, 1000.0), "size": (0.0, 50.0), "same": (7.0, 7.0)})
LOG = TargetTransform("standardise_log", 4.6, 1.2)
INSIDE = {"size": "60", "same": "7", "city": "Rome", "price": ""}


def found(value: float, half: float) -> dict[str, float | None]:
    ends = {
        f"{end}_{level * 100:g}": value + side * half for level in LEVELS for end, side in (("low", -1), ("high", 1))
    }
    return {"predicted": value, **ends, "p_num": 1.0}


def test_a_row_inside_keeps_its_prediction() -> None:
    for value in (5.0, 500.0, 1500.0):
        assert KNOWN.held(INSIDE, found(value, 0.5), LOG) == {**found(value, 0.5), OUTSIDE: ""}
    none = dict.fromkeys(found(0.0, 1.0))
    assert KNOWN.held(INSIDE, none, LOG) == {**none, OUTSIDE: None}


@pytest.mark.parametrize(("unit", "value"), [(TargetTransform(), -1e12), (LOG, 1e300), (LOG, -1e12)])
def test_an_exploding_prediction_is_held_and_its_intervals_reach_back(unit: TargetTransform, value: float) -> None:
    held = KNOWN.held(INSIDE, found(value, 1.0), unit)
    assert held[OUTSIDE] == "price"
    assert (10 if value > 0 else 0) <= held["predicted"] < 5000
    for level in LEVELS:
        low, high = held[f"low_{level * 100:g}"], held[f"high_{level * 100:g}"]
        assert 0 <= low <= held["predicted"] < high or 0 <= low < held["predicted"] <= high
        assert high - low > 200, "it is not sure"
        assert math.isfinite(low)
        assert high <= max(1990, held["predicted"]), "one range of the numbers, also of logarithms"
    assert held["p_num"] == 1.0


def test_a_number_outside_its_column_widens_by_its_distance() -> None:
    near = KNOWN.held({**INSIDE, "size": "100"}, found(500.0, 50.0), TargetTransform())
    assert near == {**near, "predicted": 500.0, "low_90": 400.0, "high_90": 600.0, OUTSIDE: "size"}
    both = KNOWN.held({**INSIDE, "size": "-1e9", "same": "9"}, found(500.0, 50.0), TargetTransform())
    assert both[OUTSIDE] == "size, same"
    assert (both["low_50"], both["high_50"]) == (0.0, 1990.0), "one range beyond, and not below 0"
    by_log = KNOWN.held({**INSIDE, "size": "1e6"}, found(90.0, 40.0), LOG)
    assert (by_log["predicted"], by_log["low_50"], by_log["high_95"]) == (90.0, 0.0, 1990.0), "no float noise"
    assert KNOWN.held({**INSIDE, "size": "100"}, found(90.0, 10.0), LOG)["low_50"] == 71.0989, "six digits"
    for cell in ("", "unknown", "nan", "000105", "1_05"):
        assert KNOWN.held({**INSIDE, "size": cell}, found(500.0, 50.0), LOG)[OUTSIDE] == ""


def test_a_category_never_seen_is_named_and_widens_as_one_range() -> None:
    known = LearntRange("price", KNOWN.ends, {"city": frozenset({"Rome", "Z\u00fcrich"})})
    wide = known.held({**INSIDE, "city": "Oslo"}, found(500.0, 50.0), TargetTransform())
    assert (wide["low_90"], wide["predicted"], wide["high_90"], wide[OUTSIDE]) == (400.0, 500.0, 600.0, "city")
    for cell in ("Rome", "", "Zu\u0308rich"):
        assert known.held({**INSIDE, "city": cell}, found(500.0, 50.0), TargetTransform())[OUTSIDE] == "", cell


def test_the_range_is_that_of_the_described_columns() -> None:
    columns = {"size": {"kind": "number", "low": 1.0, "high": 2.0}, "city": {"kind": "text", "values": ["Rome"]}}
    assert LearntRange.of(columns, "price") is None
    assert LearntRange.of({**columns, "price": {"low": 3.0, "high": 4.0}}, "price") == LearntRange(
        "price", {"size": (1.0, 2.0), "price": (3.0, 4.0)}, {"city": frozenset({"Rome"})}
    )
