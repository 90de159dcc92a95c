"""docs/numbers.md says what is read, row by row; and every digit of GSM8K is accounted for."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from support.corpora import find_left, policies, texts
from support.shared import shared_path

from cqwen_dist.config import DataConfig, NumberPolicy
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_texts
from cqwen_dist.data.write_numbers import write_numbers

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
