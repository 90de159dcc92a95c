"""Reading: every kind of bad line is one line of error, or a counted skip."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.shared import shared_path

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.diabetes import diabetes_table, diabetes_texts
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.sources import ReadReport, read_split, read_texts


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


def test_bad_lines_are_skipped_and_counted_where_the_config_says_so(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", '{"text": "good 1"}', *BAD_LINES.values(), BAD_LINES["empty text"])
    report = ReadReport()
    texts = list(read_texts(path, DataConfig(train=path, on_bad_line="skip"), report))
    assert [(text.text, text.where) for text in texts] == [("good 1", f"{path}:1")]
    assert report.read == 1
    assert report.skipped == {kind: 1 + (kind == "empty text") for kind in BAD_LINES}
    assert f"skipped: 2 x empty text, first at {path}:6" in report.lines()
    assert len(report.lines()) == len(BAD_LINES)


def test_nan_is_no_json_number(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", '{"text": "a", "v": NaN}')
    with pytest.raises(UserError, match=r":1: broken JSON: .*NaN is no JSON number"):
        _texts(path)


def test_a_missing_file_an_unknown_bundle_and_a_folder(tmp_path: Path) -> None:
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


def test_empty_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "a"}', "", "  ", '{"text": "b"}')
    assert _texts(path) == ["a", "b"]


def test_a_template_takes_strings_and_numbers_as_they_stand(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", '{"q": "How {many}?", "n": 1234567890123456789.50, "k": 1e999}')
    assert _texts(path, text_template="{q}\\n{n}") == ["How {many}?\n1234567890123456789.50"]
    assert _texts(path, text_template="{{{k}}}") == ["{1e999}"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{q.x}", r"^data\.text_template: found '\{q\.x\}', allowed: JSON fields"),
        ("{q[0]}", r"^data\.text_template"),
        ("{q:.2f}", r"^data\.text_template"),
        ("{gone}", ":1: missing field: found .*the field 'gone'"),
        ("{flag}", ":1: wrong type: found True, allowed: a string or a number"),
    ],
)
def test_bad_templates(tmp_path: Path, template: str, message: str) -> None:
    path = _write(tmp_path / "a.jsonl", '{"q": "a", "flag": true}')
    with pytest.raises(UserError, match=message):
        _texts(path, text_template=template)


def test_calculator_marks(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", json.dumps({"text": "48/2 = <<48/2=24>>24 clips, 1 << 2"}))
    assert _texts(path) == ["48/2 = 24 clips, 1 << 2"]
    assert _texts(path, calculator_marks="keep") == ["48/2 = <<48/2=24>>24 clips, 1 << 2"]
    code = "cout << a; cin >> b; if (x << 1 == y >> 1) f(); <<EOF >>log"
    assert _texts(_write(tmp_path / "code.jsonl", json.dumps({"text": code}))) == [code]


def test_limit_and_several_files(tmp_path: Path) -> None:
    files = [_write(tmp_path / f"{name}.jsonl", *(f'{{"text": "{name}{i}"}}' for i in range(3))) for name in "ab"]
    train, held_out = read_split(DataConfig(train=files, limit=4), ReadReport())
    assert [text.text for text in train] == ["a0", "a1", "a2", "b0"]
    assert held_out == []


def test_the_held_out_part_depends_on_content_alone(tmp_path: Path) -> None:
    lines = [f'{{"text": "text {i // 2}"}}' for i in range(200)]
    first = DataConfig(train=_write(tmp_path / "a.jsonl", *lines), eval_fraction=0.1)
    second = DataConfig(train=_write(tmp_path / "b.jsonl", *reversed(lines)), eval_fraction=0.1)
    parts = [tuple(sorted(t.text for t in part) for part in read_split(c, ReadReport())) for c in (first, second)]
    assert parts[0] == parts[1]
    train, held_out = parts[0]
    assert (len(train), len(held_out)) == (180, 20)
    assert not set(train) & set(held_out)  # equal texts are on one side


def test_a_held_out_part_that_takes_all_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", '{"text": "a"}')
    with pytest.raises(UserError, match=r"data\.eval_fraction: found 0\.1, allowed: less"):
        read_split(DataConfig(train=path, eval_fraction=0.1), ReadReport())


def test_the_diabetes_study_as_sentences() -> None:
    train, test = diabetes_texts("train"), diabetes_texts("test")
    assert (len(train), len(test)) == (342, 100)
    assert not set(train) & set(test)
    table = diabetes_table()
    for texts, x, y in ((train, table.x_train, table.y_train), (test, table.x_test, table.y_test)):
        values = np.array([[span.value for span in find_numbers(text)] for text in texts])
        np.testing.assert_array_equal(values[:, -1], y)
        np.testing.assert_array_equal(values[:, [1, 0, *range(2, 10)]], x)
    assert _texts("bundled:diabetes") == train + test
    assert _texts("bundled:diabetes/test") == test


def test_gsm8k_as_it_is() -> None:
    path = str(shared_path("data/gsm8k/train.jsonl"))
    report = ReadReport()
    config = DataConfig(train=path, text_template="{question}\n{answer}", eval_fraction=0.05)
    train, held_out = read_split(config, report)
    assert (report.read, report.lines()) == (7473, [])
    assert (len(train), len(held_out)) == (7099, 374)
    assert not any("<<" in text.text for text in train)
