"""Digits in view (`data.keep_digits`): a base reads its own numerals; they are not learnt, and write themselves."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.numerics import assert_close
from support.tiny import NUM, number_writer, random_ids
from torch import Tensor

from cqwen_dist.batch import IGNORE_INDEX
from cqwen_dist.checkpoint.trained import intervals_of
from cqwen_dist.config import UserError
from cqwen_dist.config.data import DataConfig, NumberPolicy
from cqwen_dist.config.shape import CHARACTERS
from cqwen_dist.data.collate import collate
from cqwen_dist.data.prepare import tokenise
from cqwen_dist.data.records import Text
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.data.write_numbers import in_decimals
from cqwen_dist.generate.generator import generate
from cqwen_dist.generate.modes import MODES
from cqwen_dist.generate.numbers import shown
from cqwen_dist.generate.streaming import NumberStreamer
from cqwen_dist.heads.expression import VALUE, at_beginning, read_tokens, symbol_table
from cqwen_dist.heads.intervals import Intervals, number_interval
from cqwen_dist.heads.numerals import characters, given_digits
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.model import CausalQwenForCausalLM
from cqwen_dist.ops.cauchy import Cauchy

ROWS = list(range(10, 22))  # of CHARACTERS in the tiny vocabulary
TEXT = "She pays 48 + 1,024.50 = 1072.5 dollars, then -7. In 2021-03-04 0.1 came."


def written(row: list[int]) -> str:
    return "".join(CHARACTERS[code] for code in row if code >= 0)


@given(st.one_of(st.floats(), st.decimals(-(10**7), 10**7, places=4).map(float), st.integers(-(10**16), 10**16)))
@example(0.1 + 0.2)
@example(999_999.9999999)
@example(1e9 - 0.5)
@example(-0.0)
def test_tensors_write_what_python_writes(value: float) -> None:
    value = float(value)
    found = written(characters(torch.tensor([value], dtype=torch.float64))[0].tolist())
    assert found == in_decimals(value)
    if abs(value) < 1e9 and value == round(value, 6):
        assert float(found) == value


def tokenizer(**policy: bool) -> NumericalAwareTokenizer:
    return NumericalAwareTokenizer(train_tokenizer([TEXT + " 0123456789-."] * 3, 300), policy=NumberPolicy(**policy))


def test_a_text_reads_as_the_bases_own_and_comes_back() -> None:
    kept, plain = tokenizer(digits=True), tokenizer()
    ids, values = kept.encode(TEXT)
    assert kept.decode(ids, values) == plain.decode(*plain.encode(TEXT))
    assert [value for value in values if value] == [value for value in plain.encode(TEXT).values if value]
    shown = [
        kept.digit_rows[CHARACTERS.index(in_decimals(v)[0])] if v else token
        for token, v in zip(ids, values, strict=True)
    ]
    assert kept.tokenizer.decode(shown) == TEXT.replace("1,024.50", "1024.5")
    assert plain.digit_rows == []


def test_only_numbers_and_words_are_learnt() -> None:
    kept = tokenizer(digits=True)
    texts = [Text(TEXT, "a:1"), Text(TEXT, "a:2", learnt=[(0, 30)])]
    config = DataConfig(train="a")
    sets = [tokenise(texts, own, config) for own in (kept, tokenizer())]
    for row in range(2):
        with_digits, without = (collate([each[row]], pad_token_id=0, num_token_id=kept.num_token_id) for each in sets)
        assert with_digits.input_ids.shape > without.input_ids.shape
        for name, none in (("labels", IGNORE_INDEX), ("numeric_labels", 0.0)):
            ours, theirs = getattr(with_digits, name)[0], getattr(without, name)[0]
            assert ours[ours != none].tolist() == theirs[theirs != none].tolist()
        number = with_digits.input_ids == kept.num_token_id
        behind = given_digits(number, with_digits.numeric_values)
        assert int(behind.sum()) > 0
        assert (with_digits.labels[:, :-1][behind[:, 1:]] == IGNORE_INDEX).all()


def model(**shape: object) -> CausalQwenForCausalLM:
    net = number_writer(digit_rows=ROWS, **shape)
    return CausalQwenForCausalLM(net.config, net).eval()


def prompts() -> tuple[Tensor, Tensor, Tensor]:
    """ids, values, mask [2,8]: the second ends within a numeral, 12 of 12.5."""
    ids, values, mask = random_ids(2, 8, seed=5, high=9), torch.zeros(2, 8, dtype=torch.float64), torch.ones(2, 8)
    mask[0, :3] = 0
    ids[1, 6:], values[1, 6] = torch.tensor([NUM, ROWS[2]]), 12.5
    return ids, values, mask


def assert_writes_whole_numerals(ids: Tensor, values: Tensor, start: int) -> int:
    """Every numeral that is whole stands behind its <NUM>; returns their number."""
    count = 0
    for row, own in zip(ids.tolist(), values.tolist(), strict=True):
        for at in range(start, len(row)):
            rest = [ROWS[CHARACTERS.index(c)] for c in in_decimals(own[at])[1:]] if row[at] == NUM else []
            end = min(at + 1 + len(rest), len(row))
            assert row[at + 1 : end] == rest[: end - at - 1]
            count += row[at] == NUM
    return count


def test_a_number_that_is_written_brings_its_digits() -> None:
    lm, (ids, values, mask) = model(), prompts()
    options = {"attention_mask": mask, "max_new_tokens": 40, "digits": 3}
    found, numbers = generate(lm.model, ids, values, **options)
    assert found[1, 8:10].tolist() == [ROWS[CHARACTERS.index(".")], ROWS[5]]
    assert assert_writes_whole_numerals(found, numbers.values, 8) >= 4
    given = given_digits(found == NUM, numbers.values)[:, 8:]
    assert torch.equal(numbers.given[:, 8:], given)
    assert (numbers.p_word[:, 8:][given] == 1).all()
    for more in ({"use_cache": False}, {"cache_implementation": "static"}):
        again, _ = generate(lm.model, ids, values, **options, **more)
        assert torch.equal(found, again)
    alone, _ = generate(lm.model, ids[:1, 3:], values[:1, 3:], max_new_tokens=40, digits=3)
    assert torch.equal(found[0, 8:], alone[0, 5:])


@pytest.mark.parametrize("mode", MODES)
def test_no_digit_follows_a_number(mode: str) -> None:
    """Digits are the likeliest words here, so without care one would follow: another number than is written."""
    lm, (ids, values, mask) = model(), prompts()
    lm.model.action.cls_bias.data[list(ROWS[:10])] += 1e4
    options = {"attention_mask": mask, "max_new_tokens": 30, "digits": 3, "mode": mode, "seed": 0}
    for more in ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"do_sample": True}):
        found, _ = generate(lm.model, ids, values, **options, **more)
        assert set(found[0, 8:].tolist()) & set(ROWS[:10])
        assert found[1, 8:10].tolist() == [ROWS[CHARACTERS.index(".")], ROWS[5]]
        assert int(found[1, 10]) not in ROWS[:10]
    end = torch.tensor([[3, NUM]]), torch.tensor([[0.0, 7.0]])
    assert int(generate(lm.model, *end, max_new_tokens=1, mode=mode)[0][0, 2]) not in ROWS[:10]


def test_the_base_reads_its_own_digits() -> None:
    lm = model()
    embedding = lm.model.features.embedding
    ids, values = torch.tensor([[3, NUM, ROWS[8], 5]]), torch.tensor([[0.0, 48.0, 0.0, 0.0]])
    with torch.no_grad():
        embedding.w_num.zero_()
        own = embedding.token_embedding(torch.tensor([[3, ROWS[4], ROWS[8], 5]]))
        assert torch.equal(embedding(ids, values), own)
        big = embedding(torch.tensor([[NUM]]), torch.tensor([[1e30]]))  # no characters: <NUM>'s own row
        assert_close(big, embedding.token_embedding(torch.tensor([[NUM]])), 1e-6, "own row")


def test_labels_of_hugging_face_leave_digits_out() -> None:
    lm = model()
    ids, values = torch.tensor([[3, NUM, ROWS[8], 5, 7]]), torch.tensor([[0.0, 48.0, 0.0, 0.0, 0.0]])
    without = ids.clone()
    without[0, 2] = IGNORE_INDEX
    loss = lm(ids, values, labels=ids).loss
    assert torch.equal(loss, lm(ids, values, labels=without).loss)
    assert not torch.equal(loss, lm(ids, values, labels=ids.masked_fill(ids == 7, IGNORE_INDEX)).loss)


def test_an_expression_is_read_through_its_digits() -> None:
    kept = tokenizer(digits=True)
    assert not {*kept.digit_rows[:10]} - {*kept.symbols[""]}
    ids, values = kept.encode("pays 48 + 1,024.50 =")
    table = symbol_table(kept.symbols, kept.num_token_id + 1, kept.num_token_id)
    state = at_beginning(1, torch.device("cpu"))
    for token, value in zip(ids, values, strict=True):
        state = read_tokens(state, table[[token]], torch.tensor([value], dtype=torch.float64))
    assert float(state[0, VALUE]) == 1072.5


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
    factors = Intervals({0.9: (0.25,)}, 80)
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


def test_interval_factors_of_older_folders_are_read_and_broken_files_are_refused(tmp_path: Path) -> None:
    assert intervals_of(tmp_path) is None
    (tmp_path / "calibration.json").write_text('{"levels": {"0.5": 0.9, "0.9": 0.31}, "n": 55}')
    found = Intervals.from_dict(intervals_of(tmp_path))
    assert (found.factors, found.edges, found.n) == ({0.5: (0.9,), 0.9: (0.31,)}, (), 55), "one factor for all sizes"
    for broken in ("{}", "[]", "{", '{"levels": {"2": 1}, "n": 5}', '{"levels": {"0.9": -1}, "n": 5}'):
        (tmp_path / "calibration.json").write_text(broken)
        with pytest.raises(UserError, match=r"calibration\.json"):
            intervals_of(tmp_path)
    for level in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="level"):
            Intervals().half_width(level, Cauchy(torch.zeros(1), torch.ones(1)))


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
