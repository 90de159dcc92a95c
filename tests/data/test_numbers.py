"""The policy, literal by literal, and the property that a value survives being written and read."""

import math
import re
import time
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from support.corpora import find_left, policies, texts
from support.shared import shared_path

from cqwen_dist.config import DataConfig, NumberPolicy
from cqwen_dist.data import numbers
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_texts
from cqwen_dist.data.write_numbers import habits_of, write_numbers

NUMBERS = {
    "价格是99.9元": [99.9],
    "48/2=24 and 5*3-1": [48, 2, 24, 5, 3, 1],
    "48 - 12 = 36": [48, 12, 36],
    "48 -12": [48, 12],
    "(3)-5 50%-20 = -7": [3, 5, 50, 20, -7],
    "-5.5, (-2) [-3] =-4 *-5 :-6": [-5.5, -2, -3, -4, -5, -6],
    "5--3=8 10--18岁 300--400": [5, -3, 8, 10, 18, 300, 400],
    "7月23日-26日 三岁-5岁 3公里-5公里 20°-25° 第2天-5度": [26, 5, 3, 5, 20, 25, 2, -5],
    "RMB300元 USD20 价格EUR5.5": [300, 20, 5.5],
    "10万 1.5亿 15％ 2千多 两百三十": [10, 1.5, 15, 2],
    "5\n-3": [5, -3],
    "气温-5度 −7°C －8": [-5, -7, -8],
    "x-5 COVID-19 --4 end.-5": [5, 19, 4, 5],
    "+5 3 + 2": [5, 3, 2],
    "1,234,567 1,234.5 $12,000": [1234567, 1234.5, 12000],
    "1,23 1234,567,890 1,234,56": [1, 23, 1234, 567, 890, 1, 234, 56],
    "1.5e-3 2E10 3e2kg": [0.0015, 2e10, 300],
    "$12 50% #5 €3 #### 72": [12, 50, 5, 3, 72],
    "3-5 3–5 3:5 3-year 10-year-old": [3, 5, 3, 5, 3, 5, 3, 10],
    "10x 5kg 1st 2nd 3D 1990s 500cm³": [10, 5, 1, 2, 3, 1990, 500],
    "3x4=12 0.5x3 2X5": [3, 4, 12, 0.5, 3, 2, 5],
    ".5 $.25 1. It... 约.5元": [0.5, 0.25, 1, 0.5],
    "No.5 end.7 ...8 1..9": [5, 7, 8, 1, 9],
    "１２．５元 ３％": [12.5, 3],
    "1，234": [1, 234],
    "2000-10-15=1975 100-50-30-15": [2000, 10, 15, 1975, 100, 50, 30, 15],
    "2024年 3月 Jan 31, 2024": [2024, 3, 31, 2024],
    "13812345000": [13812345000],
    "0 0.5, -0.25, 0.0": [0, 0.5, -0.25, 0],
    "2(3) x=-1/2": [2, 3, -1, 2],
    "5+1234567890 +1234567890.5 +1234567890kg 978-3-16 1-2-3-4": [
        5,
        1234567890,
        1234567890.5,
        1234567890,
        978,
        3,
        16,
        1,
        2,
        3,
        4,
    ],
}
TEXT = [
    *("v1.2.3", "A4", "covid19", "mp3", "x2", "_5", "é5", "python3.10"),
    *("192.168.0.1", "10.0.0.1:8080", "10.0.0.0/8", "1.2.3", "31.01.2024"),
    *("0x1F", "3a7f", "9f86d081", "1_000", "2h30m", "1e5a3"),
    *("550e8400-e29b-41d4-a716-446655440000", "deadbeef-1234-5678-9abc-123456789012"),
    *("007", "00.5", "-007"),
    *("+1-555-123-4567", "+86 138 1234 5678", "555-123-4567", "(555) 123-4567", "010-12345678", "13812345678"),
    *("138 1234 5678", "138-1234-5678", "+49 170 1234567", "+49 30 12345678", "+491701234567", "+86-10-12345678"),
    *("978-3-16-148410-0", "979-10-90636-07-1", "ISBN-978-0-306-40615-7", "0-306-40615-2", "3-16-148410-X"),
    *("2024-01-31", "2024/1/31", "31/01/2024", "12/31/2024", "01/31/24", "2024年1月31日", "1月31日", "2024年1月"),
    *("12:30", "9:30", "23:59:59", "2024-01-31T12:30:00Z", "2024-01-31 12:30"),
    *("٣", "½", "Ⅳ", "²", "", "no numerals"),
]


def test_these_texts_are_read_as_numbers() -> None:
    assert {text: [span.value for span in find_numbers(text)] for text in NUMBERS} == NUMBERS


def test_these_texts_stay_text() -> None:
    assert [text for text in TEXT if find_numbers(text) or find_numbers(f"({text})")] == []


def test_a_span_includes_the_sign() -> None:
    text = "at −1,234.5°C"
    (span,) = find_numbers(text)
    assert (text[span.start : span.end], span.value) == ("−1,234.5", -1234.5)


@pytest.mark.parametrize(
    ("switch", "text", "values"),
    [
        ({"signs": False}, "-5", [5]),
        ({"thousands": False}, "1,234", [1, 234]),
        ({"scientific": False}, "1.5e-3 2e5", [1.5, 3]),
        ({"leading_zeros": True}, "007 00.5", [7, 0.5]),
        ({"dates": True}, "2024-10-31 12:30", [2024, 10, 31, 12, 30]),
        ({"dates": True, "leading_zeros": True}, "2024-01-31", [2024, 1, 31]),
        ({"identifiers": True}, "A4 v1.2.3 555-123-4567", [4, 1.2, 3, 555, 123, 4567]),
    ],
)
def test_the_policys_switches_change_what_is_read(switch: dict[str, bool], text: str, values: list[float]) -> None:
    assert [span.value for span in find_numbers(text, NumberPolicy(**switch))] == values


def test_overflow_is_infinite_and_underflow_is_zero() -> None:
    assert [span.value for span in find_numbers("1e400, -1e400, 1e-400 " + "9" * 400)] == [
        math.inf,
        -math.inf,
        0,
        math.inf,
    ]


def test_whole_numerals_that_float64_does_not_hold_are_infinite() -> None:
    odd = "110101199003070011 -9007199254740993 １２３４５６７８９０１２３４５６７ 1,610,521,604,143,693,812"
    assert [abs(span.value) for span in find_numbers(odd)] == [math.inf] * 4
    held = "9007199254740992 1e22 10000000000000000.0"
    assert [span.value for span in find_numbers(held)] == [2.0**53, 1e22, 1e16]


@pytest.mark.parametrize("value", [1e16, -1e17, 1e22, 2.0**53 + 2])
def test_long_values_read_back_without_exponents(value: float) -> None:
    policy = NumberPolicy(scientific=False)
    assert [span.value for span in find_numbers(write_numbers(["a ", value, " b"], policy), policy)] == [value]


FORMATS = {
    48.0: "48",
    0.5: "0.5",
    -3.0: "-3",
    -0.0: "-0",
    1e300: "1e300",
    -1e300: "-1e300",
    1e16: "1e16",
    1.5e-7: "1.5e-7",
    5e-324: "5e-324",
    1234567.0: "1234567",
    0.1 + 0.2: "0.30000000000000004",
    13812345678.0: "13812345678.0",
}


def test_values_are_formatted_in_the_shortest_form() -> None:
    assert {value: write_numbers([value]) for value in FORMATS} == FORMATS


HABITS = [
    ("", [1024.0, 24.0, 0.5], "1024 24 0.5"),
    ("24.00 and 1,024", [-1025.0, 24.0, 1024.0, 25.0, 123.0], "-1,025 24.00 1,024 25 123"),
    ("in 1990 for 12,500", [1991.0, 12500.0, 1e6, 1234567.5], "1991 12,500 1,000,000 1,234,567.5"),  # not a year
    ("$2.50, $3.75, 4", [1.5, 0.125, 10.25, 6.0], "1.50 0.125 10.25 6"),
    ("2.50 and 3.125", [1.5, 2.5], "1.5 2.50"),  # no common number of decimals
    ("2.5 and 3.7", [1.25, 4.5], "1.25 4.5"),
    ("1,024 and later 1024", [1024.0, 2048.0], "1024 2048"),  # the last form
    ("0.00", [-0.0, 0.0], "-0 0"),
]


@pytest.mark.parametrize(("text", "values", "written"), HABITS)
def test_numbers_are_written_as_a_text_has_them_and_read_back(text: str, values: list[float], written: str) -> None:
    assert write_numbers(values, habits=habits_of(text)) == written
    assert [span.value for span in find_numbers(written)] == values


def test_a_habit_yields_to_a_form_that_is_read_back() -> None:
    assert write_numbers([1024.0, ",512 "], habits=habits_of("2,048")) == "1024,512 "


def test_nan_and_infinity_are_written_but_not_read() -> None:
    for value, text in ((math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")):
        assert write_numbers([value]) == text
        assert find_numbers(text) == []


@settings(max_examples=300)
@given(texts, policies)
def test_every_number_is_read_back_as_the_same_float64(text: str, policy: NumberPolicy) -> None:
    for span in find_numbers(text, policy):
        if math.isfinite(span.value):
            form = write_numbers([span.value], policy)
            assert [(0, len(form), repr(span.value))] == [(s, e, repr(v)) for s, e, v in find_numbers(form, policy)]


def _pieces(text: str, policy: NumberPolicy) -> list[str | float]:
    pieces, position = [], 0
    for start, end, value in find_numbers(text, policy):
        if math.isfinite(value):
            pieces += [text[position:start], value]
            position = end
    return [*pieces, text[position:]]


def test_written_numbers_and_texts_are_read_back_equal() -> None:
    # Short strings over few characters run into every rule's edge; four million of them have been through this.
    random = Random(0)
    alphabets = ["0012.:-", "0123456789.,:-/ ", "01259.:T -+", "1234567890-+ ()", "0123.,eExXA_ ", "12.,000"]
    alphabets += ["0129年月日.", "(),0123456xX-", "+8 01-7"]
    for _ in range(20_000):
        alphabet = random.choice(alphabets)
        text = "".join(random.choice(alphabet) for _ in range(random.randint(2, 14)))
        policy = NumberPolicy(**{name: random.random() < 0.5 for name in NumberPolicy.model_fields})
        policy = random.choice([policy, NumberPolicy()])
        pieces = _pieces(text, policy)
        written = write_numbers(pieces, policy)
        assert repr(_pieces(written, policy)) == repr(pieces), (text, written, policy)


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([100.0, ",", 456.0], "100.0,456"),  # 1e2,456
        ([5.0, ":", 30.0], "5.0:30"),
        ([3.0, "/", 4.0, "/", 2024.0], "3.0/4/2024"),
        ([1.0, ".", 5.0], "1e0.5"),
        ([0.0, "x", 5.0], "0.0x5"),
        ([1.0, 2.5, " ", 3.0], "1 2.5 3"),
        (["a ", 1.0, "kg"], "a 1kg"),
        ([math.nan, " ", 2.0], "nan 2"),
        (["A", 4.0], "A4"),  # no writing is read as a number behind a letter: then plainly
    ],
)
def test_numbers_are_written_so_that_they_are_not_misread(pieces: list[str | float], text: str) -> None:
    assert write_numbers(pieces) == text


@pytest.mark.parametrize(
    ("text", "policy", "written"),
    [
        ("+96 170 354 7903363e+87", NumberPolicy(), "+96 170 354 7903363e87"),  # with 7.903363e93 it dials no more
        ("(434,556)", NumberPolicy(accounting=True, signs=False), "(434,556)"),
        ("a (1,234.50) b", NumberPolicy(accounting=True, signs=False), "a (1,234.5) b"),
        ("x -5", NumberPolicy(accounting=True, signs=False), "x -5"),
        ("(1,234)x5", NumberPolicy(accounting=True), "(1,234)x5"),  # -1234x5 is a product of two
        ("+8 0101-170 01", NumberPolicy(leading_zeros=True), "+8 0101-170 01"),  # with 1 it dials no more
    ],
)
def test_values_and_their_count_survive_rewriting(text: str, policy: NumberPolicy, written: str) -> None:
    assert write_numbers(_pieces(text, policy), policy) == written
    again = [span.value for span in find_numbers(written, policy)]
    assert again == [span.value for span in find_numbers(text, policy)]


@settings(max_examples=400)
@given(texts, policies)
def test_the_fast_pattern_finds_what_the_policys_pattern_finds(text: str, policy: NumberPolicy) -> None:
    """Most numerals are taken without the policy's pattern, where that could find nothing else."""
    quick = find_numbers(text, policy), find_left(text, policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbers, "_NEXT", re.compile("[0-9]"))
        assert quick == (find_numbers(text, policy), find_left(text, policy))


_RANDOM = Random(0)
SMALL, TIMES = 4096, 8
# What is repeated, and what stands behind the last of it, where a pattern that hopes for it would look.
FAMILIES = {
    "rows of integers": (" ".join(str(_RANDOM.randint(100, 999)) for _ in range(512)) + " ", ""),
    "groups": ("123 ", "x"),
    "groups, zero, comma": ("123 ", "045,6"),
    "thin groups": ("123\u2009", "456:7"),
    "comma groups": ("123,", "45"),
    "commas": ("1,", ""),
    "digits": ("1", ""),
    "decimals": ("1.5 ", ""),
    "dots": ("1.", "1"),
    "letters": ("a", "1"),
    "digits then letters": ("1", "a" * 9000),
    "products": ("1x", "1"),
    "signed exponents": ("1e-1", "x"),
    "hexadecimal": ("0x", "1"),
    "minus": ("-", "5"),
    "spaces and minus": (" ", "-5"),
    "numeral, spaces": ("2024-01-31" + " " * 50, "= 5"),
    "slashes": ("1/", "1"),
    "dates glued": ("2024-01-31T", ""),
    "times with seconds": ("12:30:45.5", ""),
    "phones": ("138 1234 ", "5678"),
    "open brackets": ("(", "5)"),
    "uuids": ("550e8400-e29b-41d4-a716-446655440000 ", "5"),
    "years": ("2024年", "1月"),
    "combining": ("e\u0301", "1"),
}


def _text(family: str, size: int) -> str:
    unit, end = FAMILIES[family]
    return (unit * (size // len(unit) + 1))[:size] + end


def _seconds(text: str, policy: NumberPolicy) -> float:
    began = time.process_time()
    find_numbers(text, policy)
    find_left(text, policy)
    return time.process_time() - began


@pytest.mark.slow
def test_reading_time_is_linear_in_the_text() -> None:
    all_of = NumberPolicy(accounting=True, dates=True, identifiers=True, leading_zeros=True)
    for family, policy in product(FAMILIES, (NumberPolicy(), all_of)):
        small, large = _text(family, SMALL), _text(family, SMALL * TIMES)
        for _ in range(4):  # the machine may have been busy: linear once is linear
            once, more = min(_seconds(small, policy) for _ in range(2)), _seconds(large, policy)
            if more < 2.5 * TIMES * once + 0.01:
                break
        else:
            pytest.fail(f"{family}: {len(small)} characters took {once:.3f} s, {len(large)} took {more:.3f} s")


PAGE = Path(__file__).resolve().parents[2] / "docs" / "numbers.md"
ROWS = re.findall(r"^\| `(.+?)` \| ([^|]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_each_row_of_the_page_is_read_as_it_says() -> None:
    with_numbers = [(text, values) for text, values in ROWS if re.fullmatch(r"[-0-9., ]+", values)]
    assert (len(with_numbers), len(ROWS) - len(with_numbers)) == (len(ROWS) - 10, 10)
    assert len(with_numbers) > 20
    for text, values in ROWS:
        wanted = [float(value) for value in values.split(", ")] if (text, values) in with_numbers else []
        assert [span.value for span in find_numbers(text)] == wanted, text


def test_accounting_applies_only_to_groups_of_three_digits() -> None:
    on = NumberPolicy(accounting=True)
    text = "(1,234) (1,234.5) (12) f(1,234) 2(1,234) (-1,234) ($1,234) (1,234)5 (1,234).5 (1,234"
    values = [span.value for span in find_numbers(text, on)]
    assert values == [-1234, -1234.5, 12, 1234, 2, 1234, -1234, 1234, 1234, 5, 1234, 0.5, 1234]
    assert write_numbers(["a ", -1234.0, " b"], on) == "a -1234 b"


@settings(max_examples=300)
@given(texts, policies)
def test_numbers_and_left_digits_cover_every_ascii_digit_once(text: str, policy: NumberPolicy) -> None:
    spans = sorted([(s, e) for s, e, _ in find_numbers(text, policy)] + [(s, e) for s, e, _ in find_left(text, policy)])
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    covered = {i for start, end in spans for i in range(start, end)}
    assert all(i in covered for i, letter in enumerate(text) if letter in "0123456789")


def test_a_number_before_zeros_is_written_so_that_the_zeros_stay_text() -> None:
    assert write_numbers([5.0, " 000"]) == "5.0 000"
    assert [span.value for span in find_numbers("5.0 000")] == [5.0]


def test_every_digit_of_gsm8k_is_accounted_for() -> None:
    config = DataConfig(train=str(shared_path("data/gsm8k/train.jsonl")), text_template="{question}\n{answer}")
    numbers, digits, kinds, left, report = 0, 0, Counter[str](), Counter[str](), ReadReport()
    for text, *_ in read_texts(str(config.train), config, report):
        assert "<<" not in text
        covered = bytearray(len(text))
        for start, end, _ in find_numbers(text):
            numbers += 1
            covered[start:end] = b"n" * (end - start)
        for start, end, kind in find_left(text):
            kinds[kind] += 1
            left[text[start:end]] += 1
            covered[start:end] = b"t" * (end - start)
        found = [match.start() for match in re.finditer(r"\d", text)]
        digits += len(found)
        assert all(covered[i] for i in found), text
    assert (report.read, report.lines(), numbers, digits) == (7473, [], 126_672, 247_582)
    assert kinds == {"date": 126, "identifier": 23, "zeros": 8}
    assert {literal for literal in left if ":" not in literal} == {
        *("0900", "0000", "0130", "0730"),  # hours, and the error "16,0000"
        *("3", "2", "1", "4"),  # mp3, D3, D2, m2, A4, x4
        *("20", "30"),  # "because20-3", "was30 - 2"
    }
