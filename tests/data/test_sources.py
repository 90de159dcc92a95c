"""Reading: every kind of bad line is one line of error, or a counted skip."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cqwen_dist.config import DataConfig, NumberPolicy, UserError
from cqwen_dist.data.blocks import blocks
from cqwen_dist.data.cells import as_text
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_split, read_texts
from cqwen_dist.tools.diabetes import diabetes_table, diabetes_texts


def _write(path: Path, *lines: str | bytes) -> str:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return str(path)


def _texts(source: str, **config: object) -> list[str]:
    return [text.text for text in read_texts(source, DataConfig(train=source, **config), ReadReport())]


BAD_LINES = {
    "broken JSON": '{"text": "half',
    "no JSON object": '["text"]',
    "missing field": '{"txt": "a"}',
    "wrong type": '{"text": [5]}',
    "empty text": '{"text": " \\n"}',
    "not UTF-8": b'{"text": "\xff"}',
    "not Unicode text": '{"text": "\\ud800"}',
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_an_error_that_names_file_and_line(tmp_path: Path, kind: str) -> None:
    path = _write(tmp_path / "a.jsonl", '{"text": "good 1"}', BAD_LINES[kind], '{"text": "good 2"}')
    with pytest.raises(UserError) as error:
        _texts(path)
    assert str(error.value).startswith(f"{path}:2: {kind}: found ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("name\ntea 5 €\n".encode("cp1252"), ":2: not UTF-8: .*iconv -f WINDOWS-1252 -t UTF-8"),
        ("name\ntea\n".encode("utf-16"), ":1: not UTF-8: .*iconv -f UTF-16 -t UTF-8"),
        ("name\ntea\n".encode("utf-16-le"), ":1: not UTF-8: found zero bytes, .*iconv -f UTF-16LE -t UTF-8"),
        (b"name\rtea\r", r":1: broken CSV: .*\\n after a line"),
    ],
)
def test_a_table_of_another_encoding_or_line_end_is_refused_with_the_way_out(tmp_path, content, told) -> None:
    (tmp_path / "excel.csv").write_bytes(content)
    with pytest.raises(UserError, match=told):
        _texts(str(tmp_path / "excel.csv"), text_field="name")


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, lambda data: b"\x28\xb5\x2f\xfd" + data])
def test_a_packed_file_is_named_as_such(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "a.jsonl.x").write_bytes(pack(b'{"text": "a"}\n'))
    with pytest.raises(UserError, match=r":1: not UTF-8: .* allowed: a file that is not packed, or packed by gzip"):
        _texts(str(tmp_path / "a.jsonl.x"))


@pytest.mark.parametrize(("content", "way"), [('[{"text": "a"},\n {"text": "b"}]', ".json"), ("# Title", ".txt")])
def test_a_file_that_has_no_object_a_line_names_the_way_out(tmp_path: Path, content: str, way: str) -> None:
    with pytest.raises(UserError, match=rf":1: broken JSON: .* in a \{way}\b"):
        _texts(_write(tmp_path / "a.jsonl", content))


def test_bad_lines_are_skipped_and_counted_where_the_config_says_so(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", '{"text": "good 1"}', *BAD_LINES.values(), BAD_LINES["empty text"])
    report = ReadReport()
    texts = list(read_texts(path, DataConfig(train=path, on_bad_line="skip"), report))
    assert [(text.text, text.where) for text in texts] == [("good 1", f"{path}:1")]
    assert report.read == 1
    assert report.skipped == {kind: 1 + (kind == "empty text") for kind in BAD_LINES}
    assert f"skipped: 2 x empty text, first at {path}:6" in report.lines()
    assert len(report.lines()) == len(BAD_LINES)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_a_constant_of_python_in_an_unread_field_of_json_says_nothing(tmp_path: Path, constant: str) -> None:
    path = _write(tmp_path / "a.jsonl", f'{{"text": "a", "v": {constant}}}')
    assert _texts(path) == ["a"]
    told = "empty cell: found nan" if constant == "NaN" else "wrong type: found -?inf"
    with pytest.raises(UserError, match=f":1: {told}"):
        _texts(path, text_field="v")


def test_refuses_a_missing_file_an_unknown_bundle_and_a_folder(tmp_path: Path) -> None:
    allowed = "a file or folder that exists, hf:NAME or bundled:NAME"
    with pytest.raises(UserError, match=rf"data\.train: found no file .*nowhere\.jsonl, allowed: {allowed}"):
        _texts(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(UserError, match="contain any data files"):
        _texts(str(tmp_path))
    with pytest.raises(UserError, match="allowed: bundled:diabetes or bundled:diabetes/train"):
        _texts("bundled:iris")
    present = _write(tmp_path / "a.jsonl", '{"text": "a"}')
    with pytest.raises(UserError, match=r"data\.eval: found no file"):
        read_split(DataConfig(train=present, eval=str(tmp_path / "nowhere.jsonl")), ReadReport())


def test_empty_lines_and_a_byte_order_mark_are_skipped(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "a"}', "", "  ", '{"text": "b"}')
    assert _texts(path) == ["a", "b"]


def test_a_template_inserts_strings_and_numbers_unchanged(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", '{"q": "How {many}?", "n": 1234567890123456789.50, "k": 1e999}')
    assert _texts(path, text_template="{q}\\n{n}") == ["How {many}?\n1234567890123456789.50"]
    assert _texts(path, text_template="{{{k}}}") == ["{1e999}"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{gone}", ":1: missing field: found .*the field 'gone'"),
        ("{list}", r":1: wrong type: found \['a'\], allowed: a string or a number"),
    ],
)
def test_bad_templates_are_refused(tmp_path: Path, template: str, message: str) -> None:
    path = _write(tmp_path / "a.jsonl", '{"q": "a", "list": ["a"]}')
    with pytest.raises(UserError, match=message):
        _texts(path, text_template=template)


def test_calculator_marks_are_removed(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", json.dumps({"text": "48/2 = <<48/2=24>>24 clips, 1 << 2"}))
    assert _texts(path) == ["48/2 = 24 clips, 1 << 2"]
    code = "cout << a; cin >> b; if (x << 1 == y >> 1) f(); <<EOF >>log"
    assert _texts(_write(tmp_path / "code.jsonl", json.dumps({"text": code}))) == [code]


def test_a_json_array_is_read_record_by_record(tmp_path: Path) -> None:
    records = [{"text": f"é {i} {'x' * (i % 90)}", "n": {"a": [i, "]"]}} for i in range(200)]
    forms = {"pretty.json": json.dumps(records, indent=1), "flat.json": json.dumps(records, ensure_ascii=False)}
    for name, text in forms.items():
        path = tmp_path / name
        path.write_text(f"\n {text} \n" if name == "flat.json" else text, encoding="utf-8-sig")
        found = list(read_texts(str(path), DataConfig(train=str(path)), ReadReport()))
        assert [text.text for text in found] == [record["text"] for record in records]
        if name == "pretty.json":
            assert [text.where for text in found] == [f"{path}:{2 + 9 * i}" for i in range(200)]
        zipped = tmp_path / f"{name}.gz"
        zipped.write_bytes(gzip.compress(path.read_bytes()))
        assert _texts(str(zipped)) == [record["text"] for record in records]
    assert _texts(_write(tmp_path / "none.json", " [ ] ")) == []
    assert _texts(_write(tmp_path / "lines.json", '{"text": "a"}', '{"text": "b"}')) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b'[{"text": "a"},\n {"text": "b"]', r":2: broken JSON: found .*a list of records .Expecting"),
        (b'[{"text": "a"}', r":1: broken JSON: .*no list of records"),
        (b'[{"text": "a"}\n {"text": "b"}]', r":[12]: broken JSON: .*no list of records"),
        (b'[{"text": "a"}] more', r":1: broken JSON"),
        (b'[{"text": "a"},\n\n7]', r":3: no JSON object: found '7', allowed: a list of JSON objects"),
        (b'[{"text": "\xff"}]', r":1: not UTF-8"),
        (b'[{"text": NaN}]', r":1: empty cell: found nan"),
    ],
)
def test_a_broken_json_array_is_one_line(tmp_path: Path, text: bytes, told: str) -> None:
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(UserError, match=told):
        _texts(str(tmp_path / "a.json"))


def test_the_csv_delimiter_and_decimal_sign_are_detected(tmp_path: Path) -> None:
    template = {"text_template": "{name}|{x, y}|{z}"}
    for sign in ",;\t|":
        path = _write(
            tmp_path / "a.csv", f'name{sign}"x, y"{sign}z', f'"a{sign}b"{sign}"2;5"{sign}1,5'.replace("1,5", "1.5")
        )
        assert _texts(path, **template) == [f"a{sign}b|2;5|1.5"]
    assert _texts(_write(tmp_path / "b.csv", "text", "a"), text_field="text") == ["a"]
    comma = _write(tmp_path / "c.csv", "text;x;y", "a;1.234,5;b", "b;2,5;c;", "c;-0,25;1,x")
    assert _texts(comma, on_bad_line="skip") == ["a", "c"]  # a column that is not asked for says nothing
    read = {"text_template": "{text} {x} {y}", "on_bad_line": "skip"}
    assert _texts(comma, **read) == ["a 1234.5 b", "c -0.25 1,x"]
    assert _texts(comma, **read, number_columns={}) == ["a 1.234,5 b", "c -0,25 1,x"]
    with pytest.raises(UserError, match=r"c\.csv:1: missing field: found \['text', 'x', 'y'\], allowed: a table with"):
        _texts(comma, text_field="z")


def test_numbers_become_text_in_their_shortest_form(tmp_path: Path) -> None:
    assert _texts(_write(tmp_path / "a.jsonl", '{"text": 42}', '{"text": -1.50}')) == ["42", "-1.50"]
    columns = {
        "a": pa.array([0.1, 3.0], pa.float32()),
        "b": pa.array([1e-7, 0.1 + 0.2], pa.float64()),
        "c": pa.array([-(2**63), 7], pa.int64()),
        "d": pa.array([Decimal("12.50"), Decimal("-0.01")], pa.decimal128(9, 2)),
        "e": pa.array([date(2024, 1, 31)] * 2),
    }
    pa.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    found = _texts(str(tmp_path / "a.parquet"), text_template="{a} {b} {c} {d} {e}")
    assert found == ["0.1 1e-07 -9223372036854775808 12.50 2024-01-31", "3 0.30000000000000004 7 -0.01 2024-01-31"]


@settings(max_examples=300)
@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**15), 10**15))
@example(13000000001)  # as a telephone number
def test_a_target_is_taken_exactly(value: float) -> None:
    (number,) = find_numbers(as_text(value) or "", NumberPolicy(identifiers=True))
    assert number.value == value


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ('"2024-01-31"', "no number: found '2024-01-31', allowed: what is read as <NUM> in the field 'y'"),
        ("true", "no number: found 'true'"),
        ('""', "empty cell: found ''"),
        ("null", "empty cell: found None"),
        ('"n/a"', "empty cell: found 'n/a'"),
        ('"-"', "empty cell: found '-'"),
        ('"#DIV/0!"', "empty cell: found '#DIV/0!'"),
        ('"1e999"', "no number: found '1e999'"),
    ],
)
def test_a_target_that_is_not_a_number_is_a_bad_line(tmp_path: Path, cell: str, told: str) -> None:
    path = _write(tmp_path / "a.jsonl", '{"y": "1,234 g"}', f'{{"y": {cell}}}')
    with pytest.raises(UserError, match=rf"a\.jsonl:2: {told}"):
        _texts(path, text_template="y {y}", target_field="y", empty_cell="none")
    with pytest.raises(UserError, match=r"a\.jsonl:1: no number: found '1.*, here in 'No1.* \.'"):
        _texts(path, text_template="No{y} .", target_field="y", empty_cell="none")


@pytest.mark.parametrize(
    ("cell", "number"),
    [
        ('"007"', "7"),
        ("13000000001", "13000000001.0"),
        ('"+5"', "5"),
        ('"(1,234)"', "-1234"),
        ('"5-"', "-5"),
        ("5.0", "5"),
        ('"110101199003070011"', "1.1010119900307002e+17"),
    ],
)
def test_a_target_is_written_as_plain_numeral_that_reads_as_its_number(tmp_path: Path, cell: str, number: str) -> None:
    path = _write(tmp_path / "a.jsonl", f'{{"y": {cell}}}')
    assert _texts(path, text_template="y {y}", target_field="y") == [f"y {number}"]


def test_watched_texts_are_read_as_the_training_texts(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.csv", "text", "(1,234)")
    config = DataConfig(train="t", numbers="accounting", sequence_length=7, watch={"w": path}).of_watched("w")
    assert (config.train, config.sequence_length, config.policy.accounting) == (path, 7, True)


def test_a_file_pattern_reads_its_files_in_order(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        _write(tmp_path / f"part-{name}.jsonl", f'{{"text": "{name}"}}')
    _write(tmp_path / "part-b.txt", "text of b")
    assert _texts(str(tmp_path / "part-*")) == ["a", "b", "text of b", "c"]
    assert _texts(str(tmp_path / "**" / "part-[!a].jsonl")) == ["b", "c"]
    _write(tmp_path / "part-*.jsonl", '{"text": "a file of that name"}')
    assert _texts(str(tmp_path / "part-*.jsonl")) == ["a file of that name"]
    with pytest.raises(UserError, match=r"data\.train: found no file .*/x-\*\.jsonl, allowed: a pattern that a file"):
        _texts(str(tmp_path / "x-*.jsonl"))


def test_a_limit_applies_over_several_files(tmp_path: Path) -> None:
    files = [_write(tmp_path / f"{name}.jsonl", *(f'{{"text": "{name}{i}"}}' for i in range(3))) for name in "ab"]
    train, held_out = read_split(DataConfig(train=files, limit=4), ReadReport())
    assert [text.text for text in train] == ["a0", "a1", "a2", "b0"]
    assert held_out == []


def test_the_held_out_part_depends_only_on_the_content(tmp_path: Path) -> None:
    lines = [f'{{"text": "text {i // 2}"}}' for i in range(200)]
    first = DataConfig(train=_write(tmp_path / "a.jsonl", *lines), eval_fraction=0.1)
    second = DataConfig(train=_write(tmp_path / "b.jsonl", *reversed(lines)), eval_fraction=0.1)
    parts = [tuple(sorted(t.text for t in part) for part in read_split(c, ReadReport())) for c in (first, second)]
    assert parts[0] == parts[1]
    train, held_out = parts[0]
    assert (len(train), len(held_out)) == (180, 20)
    assert not set(train) & set(held_out)  # equal texts are on one side


def test_refuses_to_hold_out_all_texts(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", '{"text": "a"}')
    with pytest.raises(UserError, match=r"data\.eval_fraction: found 0\.1, allowed: less"):
        read_split(DataConfig(train=path, eval_fraction=0.1), ReadReport())


def test_reads_the_diabetes_study_as_sentences() -> None:
    train, test = diabetes_texts("train"), diabetes_texts("test")
    assert (len(train), len(test)) == (342, 100)
    assert not set(train) & set(test)
    for texts, (x, y) in ((train, diabetes_table()["train"]), (test, diabetes_table()["test"])):
        values = np.array([[span.value for span in find_numbers(text)] for text in texts])
        np.testing.assert_array_equal(values[:, -1], y)
        np.testing.assert_array_equal(values[:, [7, 6, 9, 8, *range(6)]], x)
    assert _texts("bundled:diabetes") == train + test
    assert _texts("bundled:diabetes/test") == test


def test_a_parquet_dictionary_of_one_large_value_is_read_in_small_blocks(tmp_path: Path) -> None:
    """A file of some hundred bytes may hold a thousand texts of a megabyte."""
    path = tmp_path / "bomb.parquet"
    text = "a" * (1 << 20)
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), pa.array([text]))
    pyarrow.parquet.write_table(pa.table({"text": texts}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    assert [len(block) for block in blocks(str(path), DataConfig(train=str(path)), "")] == [1] * 200
