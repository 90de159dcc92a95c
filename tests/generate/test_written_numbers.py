"""Digits that mean something, and intervals: the Cauchy's own, or recalibrated."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.numerics import assert_close

from cqwen_dist.config import UserError
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.generate.numbers import shown
from cqwen_dist.generate.streaming import NumberStreamer
from cqwen_dist.heads.intervals import Intervals, number_interval, read_intervals
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.ops.cauchy import Cauchy

WORDS = NumericalAwareTokenizer(train_tokenizer(["we go at 12:30, 5月3日, on 2024-11-12, for 100,456 km."] * 9, 300))
STANDARD = TargetTransform("standardise", 150.0, 40.0)


@pytest.mark.parametrize(
    ("value", "spread", "expected"),
    [
        (152.7345, 12.3, 153.0),  # two digits of the spread
        (152.7345, 1.23, 152.7),
        (-0.0123456, 0.0005, -0.01235),
        (152.7345, 800.0, 150.0),  # 152.73 +- 800: tens
        (3.2, 5000.0, 3.0),  # the spread swallows it: its first digit
        (1234.5678, 0.0, 1234.5678),
        (1e300, 1e-300, 1e300),
    ],
)
def test_a_value_has_the_digits_that_its_uncertainty_leaves(value: float, spread: float, expected: float) -> None:
    assert shown(value, spread) == expected


def test_numbers_are_written_with_the_requested_digits() -> None:
    assert shown(152.7345, 99.0, 5) == 152.73
    assert shown(1 / 3, 0.0, 17) == 1 / 3
    for digits in (0, 18):
        with pytest.raises(UserError, match="digits"):
            shown(1.0, 0.0, digits)


def test_a_half_is_rounded_as_python_rounds_it() -> None:
    """To even where it is one exactly, above and below the point; to its own side where float64 is a little off it."""
    halves = [k * 10.0**e + 5 * 10.0 ** (e - 1) for e in (6, 3, 2, 1) for k in range(1, 10)]
    halves += [k + 0.5 for k in range(1, 10)] + [k / 4 + 0.125 for k in range(8)] + [2.675, 1.005, 1.015, 0.15, 0.35]
    for value in halves:
        for digits in (1, 2, 3):
            assert shown(-value, 0.0, digits) == -shown(value, 0.0, digits) == -float(f"{value:.{digits}g}"), value


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_the_interval_of_a_cauchy_holds_its_share(level: float) -> None:
    """Its own quantiles, through the target's transform: 1e5 draws, three deviations."""
    y = Cauchy(torch.tensor([0.3], dtype=torch.float64), torch.tensor([0.2], dtype=torch.float64))
    low, high = number_interval(y, STANDARD, Intervals(), level)
    draws = y.sample(torch.rand(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    raw = STANDARD.inverse(draws)
    held = float(((raw > low) & (raw < high)).double().mean())
    assert held == pytest.approx(level, abs=3 * math.sqrt(level * (1 - level) / 1e5))


def test_a_factor_changes_only_the_interval_of_its_level() -> None:
    y = Cauchy(torch.tensor([0.3], dtype=torch.float64), torch.tensor([0.2], dtype=torch.float64))
    factors = Intervals({0.9: 0.25}, 80)
    (low, high), (raw_low, raw_high) = (number_interval(y, STANDARD, i, 0.9) for i in (factors, Intervals()))
    assert_close(high - low, 0.25 * (raw_high - raw_low), 1e-12)
    a, b = (number_interval(y, STANDARD, i, 0.5) for i in (factors, Intervals()))
    assert torch.equal(torch.stack(a), torch.stack(b))
    skewed = number_interval(y, TargetTransform("signed_log"), factors, 0.9)
    assert_close(
        torch.stack(skewed).sign() * torch.stack(skewed).abs().log1p(),
        torch.stack((y.loc - 0.25 * 6.313751514675043 * 0.2, y.loc + 0.25 * 6.313751514675043 * 0.2)),
        1e-9,
    )


def test_interval_factors_round_trip_and_broken_files_are_refused(tmp_path: Path) -> None:
    assert read_intervals(tmp_path) == Intervals()
    (tmp_path / "calibration.json").write_text('{"levels": {"0.5": 0.9, "0.9": 0.31}, "n": 55}')
    found = read_intervals(tmp_path)
    assert (found.factors, found.n) == ({0.5: 0.9, 0.9: 0.31}, 55)
    assert Intervals.from_dict(found.to_dict()) == found
    for broken in ("{}", "[]", "{", '{"levels": {"2": 1}, "n": 5}', '{"levels": {"0.9": -1}, "n": 5}'):
        (tmp_path / "calibration.json").write_text(broken)
        with pytest.raises(ValueError):
            read_intervals(tmp_path)
    for level in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="level"):
            Intervals().half_width(level)


@pytest.mark.parametrize(
    ("pieces", "streamed", "whole"),
    [
        (["at ", 12, ":", 30, " we go"], "at 12:30 we go", "at 12.0:30 we go"),
        ([100, ",456 km, ", 3, -5, " km"], "100,456 km, 3 -5 km", "100.0,456 km, 3 -5 km"),
        ([12, ":", 30, 5, ":", 45, " go"], "12:30 5:45 go", "12.0:30 5.0:45 go"),
    ],
)
def test_a_stream_goes_on_where_a_later_token_gives_a_sent_number_another_form(pieces, streamed, whole) -> None:
    encoded = [WORDS.encode(p) if isinstance(p, str) else ([WORDS.num_token_id], [float(p)]) for p in pieces]
    ids, values = ([x for own in encoded for x in own[i]] for i in (0, 1))
    none = torch.zeros(1, len(ids), dtype=torch.bool)
    numbers: Any = SimpleNamespace(written=lambda row, at, digits: values[at], given=none, abstained=none)
    sent: list[str] = []
    streamer = NumberStreamer(WORDS, sent.append)
    for _ in range(2):  # a streamer serves several texts
        for end in range(1, len(ids) + 1):
            streamer.put(torch.tensor([ids[:end]]), numbers)
        streamer.end()
    assert "".join(sent) == 2 * streamed
    assert WORDS.decode(ids, values) == whole
