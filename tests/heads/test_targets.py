"""The regression's unit: forward and inverse agree, float64 in, fp32 out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cqwen_dist.heads.targets import NAMES, TargetTransform


@given(
    st.sampled_from(NAMES),
    st.floats(-1e6, 1e6),
    st.floats(1e-3, 1e6),
    st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=5),
)
def test_inverse_undoes_forward_to_fp32(name: str, median: float, scale: float, values: list[float]) -> None:
    transform = TargetTransform(name, median, scale)
    raw = torch.tensor(values, dtype=torch.float64)
    target = transform.forward(raw)
    assert target.dtype == torch.float32
    back = transform.inverse(target)
    assert back.dtype == torch.float64
    # fp32 rounds the target; signed_log turns that into a relative error of about |t| 2^-24.
    if name == "signed_log":
        tolerance = 4e-6 * (raw.abs() + 1)
    elif name == "standardise_log":
        tolerance = (4e-6 + 2e-7 * abs(median)) * (raw.abs() + 1)
    else:
        tolerance = 2e-7 * ((raw - median).abs() if name == "standardise" else raw.abs()) + 1e-9 * (1 + abs(median))
    assert ((back - raw).abs() <= tolerance).all()


def test_forward_equals_values_computed_by_hand() -> None:
    raw = torch.tensor([99.9, -3.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(TargetTransform("none").forward(raw), raw.float())
    torch.testing.assert_close(TargetTransform("standardise", 10.0, 2.0).forward(raw), ((raw - 10) / 2).float())
    expected = torch.tensor([math.log(100.9), -math.log(4.0), 0.0])
    torch.testing.assert_close(TargetTransform("signed_log").forward(raw), expected)
    torch.testing.assert_close(TargetTransform("standardise_log", 2.0, 0.5).forward(raw), (expected - 2) / 0.5)


def test_large_integers_keep_their_difference() -> None:
    # 2^24 and 2^24 + 1 are one number in fp32, but not when the subtraction happens in float64 first.
    raw = torch.tensor([2.0**24, 2.0**24 + 1], dtype=torch.float64)
    assert TargetTransform("standardise", 2.0**24, 1.0).forward(raw).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("name", NAMES)
def test_extreme_values_stay_finite(name: str) -> None:
    transform = TargetTransform(name, 0.0, 1e-9)
    target = transform.forward(torch.tensor([1e308, -1e308], dtype=torch.float64))
    assert torch.isfinite(target).all()
    assert torch.isfinite(transform.inverse(torch.tensor([3e38, -3e38]))).all()


def test_scales() -> None:
    scales = torch.tensor([0.5, 2.0])
    assert TargetTransform("standardise", 7.0, 4.0).inverse_scale(scales).tolist() == [2.0, 8.0]
    assert TargetTransform("none", 7.0, 4.0).inverse_scale(scales).tolist() == [0.5, 2.0]
    with pytest.raises(ValueError, match="not linear"):
        TargetTransform("signed_log").inverse_scale(scales)


@pytest.mark.parametrize("args", [("log", 0.0, 1.0), ("none", math.nan, 1.0), ("standardise", 0.0, 0.0)])
def test_refuses_targets_without_a_usable_scale(args: tuple[str, float, float]) -> None:
    with pytest.raises(ValueError):
        TargetTransform(*args)
