"""A value has one text, and a column one way to write numbers, whatever file brings them."""

import json
import math
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.cells import Literal, TableCells, cell_text, is_empty
from cqwen_dist.data.columns import described, forms_in, given_forms, sample
from cqwen_dist.data.from_memory import as_rows, write_records
from cqwen_dist.data.from_memory import records as from_memory
from cqwen_dist.data.number_forms import Form, Unsettled, by_form, forms_of, numeral
from cqwen_dist.data.recipes import recognise
from cqwen_dist.data.records import ReadReport, Text
from cqwen_dist.data.sources import read_texts
from cqwen_dist.prediction.learnt_table import compare

SAME: dict[str, list[Any]] = {
    "2024-01-07": [
        *(date(2024, 1, 7), datetime(2024, 1, 7), pd.Timestamp("2024-01-07"), np.datetime64("2024-01-07")),
        *("2024-01-07", "2024-01-07 00:00:00", "2024-01-07T00:00:00.000", " 2024-01-07T00:00 "),
    ],
    "2024-01-31 10:20:00": [datetime(2024, 1, 31, 10, 20), pd.Timestamp("2024-01-31 10:20"), "2024-01-31T10:20:00.000"],
    "2024-01-31 10:20:00.5": ["2024-01-31 10:20:00.500", datetime(2024, 1, 31, 10, 20, 0, 500000)],
    "2024-01-31 10:20:00+00:00": [datetime(2024, 1, 31, 10, 20, tzinfo=timezone.utc), "2024-01-31T10:20:00Z"],
    "0": [0, -0.0, np.float32(-0.0), Literal("-0"), Literal("-0.00"), Decimal("-0.0")],
    "10:20:00": [time(10, 20), "10:20:00"],
    "1 days 02:00:00": [timedelta(days=1, hours=2), pd.Timedelta(hours=26), "1 days 02:00:00"],
    "true": [True, np.bool_(True), "true", "True", "TRUE"],
    "5": [5, 5.0, np.float32(5), np.int8(5), Decimal("5.00"), Literal("5.0")],
    "0.1": [0.1, np.float32(0.1), Decimal("0.10"), Literal("0.10")],
    "1e-05": [1e-5, Literal("0.00001"), Decimal("0.00001")],
    "9007199254740993": [9007199254740993, Literal("9007199254740993")],
    "[1, 2.5]": [[1, 2.5], (1.0, 2.5), np.array([1, 2.5]), "[1.0, 2.5]", "[1,2.5]"],
    '{"a": ["x", true], "b": "é"}': [
        *({"b": "é", "a": ["x", True], "c": None}, '{"a":["x",true],"b":"é"}', "{'b': 'é', 'a': ['x', True]}")
    ],
    "2024-01": [pd.Period("2024-01"), "2024-01"],
    "[deleted]": ["[deleted]"],
    "{broken": ["{broken"],
    "x": ["x", b"x", " x "],
}


def test_one_value_has_one_text() -> None:
    for text, values in SAME.items():
        plain = [value.item() if isinstance(value, np.datetime64) else value for value in values]
        assert [cell_text(value) for value in plain] == [text] * len(plain), values
    for value in (b"\xff", float("inf"), object(), {1, 2}):
        assert cell_text(value) is None


def test_every_null_is_empty() -> None:
    for value in (None, float("nan"), np.nan, pd.NA, pd.NaT, "", np.float32("nan"), Decimal("nan")):
        assert is_empty(value)
        assert TableCells({}).text("x", value) == ""


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**18), 10**18))
def test_a_number_keeps_its_value(value: float) -> None:
    text = cell_text(value)
    assert text is not None
    assert (int(text) if isinstance(value, int) else float(text)) == value
    assert numeral(str(value)) == text == numeral(text)


FORMS: list[tuple[list[str], str, list[str]]] = [  # cells, their form, their numerals
    (["1010", "26.5", ".5", "5."], "1234.5", ["1010", "26.5", "0.5", "5"]),
    (["2,010", "821"], "1234.5", ["2010", "821"]),
    (["$2,010.50", "$5"], "$1234.5", ["2010.5", "5"]),
    (["$(1,234)", "-$5", "($6.50)"], "$1234.5", ["-1234", "-5", "-6.5"]),
    (["R$ 1.234,56", "R$ 2,5"], "R$1234,5", ["1234.56", "2.5"]),
    (["1.234,50 €", "5 €", "0,5 €"], "1234,5 €", ["1234.5", "5", "0.5"]),
    (["€ 3,50", "€ 12,25"], "€1234,5", ["3.5", "12.25"]),
    (["CHF 1'234.50", "CHF 5"], "CHF 1234.5", ["1234.5", "5"]),
    (["1’234.5", "12"], "1234.5", ["1234.5", "12"]),
    (["1,00,000", "12,34,567.8"], "1234.5", ["100000", "1234567.8"]),
    (["₹ 1,00,000.50"], "₹1234.5", ["100000.5"]),
    (["10.1%", "8.21 %"], "1234.5%", ["10.1", "8.21"]),
    (["12,5 %", "3 %"], "1234,5%", ["12.5", "3"]),
    (["1010 kg", "821"], "1234.5 kg", ["1010", "821"]),
    (["80 m²", "95.5 m²"], "1234.5 m²", ["80", "95.5"]),
    (["120 km/h", "90 km/h"], "1234.5 km/h", ["120", "90"]),
    (["1,200 sq ft"], "1234.5 sq ft", ["1200"]),
    (["21 °C", "−3 °C"], "1234.5 °C", ["21", "-3"]),
    (["(2,010)", "1,821"], "1234.5", ["-2010", "1821"]),
    (["−1010", "+5", "5-"], "1234.5", ["-1010", "5", "-5"]),
    (["12,-", "-13,--", "12,50-", "1.200,–"], "1234,5", ["12", "-13", "-12.5", "1200"]),  # a dash instead of cents
    (["CHF 1'200.–", "CHF 50.-", "CHF -3.50"], "CHF 1234.5", ["1200", "50", "-3.5"]),
    (["€ 12,—", "€ 5,20"], "€1234,5", ["12", "5.2"]),
    (["-0.0", "(0)", "-0", "1.5"], "1234.5", ["0", "0", "0", "1.5"]),
    (["2\u00a0010", "1\u202f821,5"], "1234,5", ["2010", "1821.5"]),
    (["1 010", "12 345 678"], "1234.5", ["1010", "12345678"]),
    (["３５", "１２．５"], "1234.5", ["35", "12.5"]),
    (["1e3", "1.5E-5"], "1234.5", ["1000", "1.5e-05"]),
    (["1.234.567", "5"], "1234,5", ["1234567", "5"]),
    (["?", "-", "3,5", "–"], "1234,5", ["", "", "3.5", ""]),
    (["0.123", "1.238"], "1234.5", ["0.123", "1.238"]),
    (["12.345", "101.250"], "1234.5", ["12.345", "101.25"]),
]


def test_a_column_has_one_form_of_numbers() -> None:
    for cells, form, numerals in FORMS:
        (found,) = forms_of({"x": cells}).values()
        assert str(found) == form
        assert Form.of(form) == found
        assert [TableCells({"x": found}).text("x", cell) for cell in cells] == numerals
        assert forms_of({"x": [*cells, "many"]}) == {}


def test_other_columns_stay_text() -> None:
    for cells in (
        *(["2024-01-31", "2024-02-01"], ["12:30", "9:45"], ["1.2.3", "1.2.4"], ["A4", "A5"], ["007", "010"]),
        *(["1 kg", "2 lb"], ["10 %", "0.1"], ["950", "1.2k"], ["950 €", "1,2 Mio €"], ["3/4", "1/2"]),
        *(["555-1234", "555-9876"], ["+49 30 12", "+49 30 13"], ["2.5", "2,5"], ["$5", "€5"], ["?", "-"]),
        *(["1--2", "3"], ["12 345 67", "1"], ["c335", "a693"]),
    ):
        assert forms_of({"x": cells}) == {}, cells


@pytest.mark.parametrize(
    ("cells", "delimiter"),
    [
        (["962", "1.238"], ";"),
        (["962", "1.238"], ","),
        (["962 €", "1.238 €"], "\t"),
        (["-12.500", "7"], "|"),
        (["2.010", "1.821"], ";"),
        (["2,010", "1,821"], ";"),
        (["962", "1,238"], "\t"),
    ],
)
def test_two_readings_are_asked_for_and_settled_by_the_key(cells: list[str], delimiter: str) -> None:
    with pytest.raises(Unsettled):
        forms_of({"x": cells}, delimiter=delimiter)
    read = {comma: forms_of({"x": cells}, delimiter=delimiter, decimal_comma=comma)["x"] for comma in (True, False)}
    assert (read[True].decimal, read[False].decimal) == (",", ".")
    assert read[True].read(cells[0]) != read[False].read(cells[0]) or read[True].read(cells[1]) != read[False].read(
        cells[1]
    )


def test_another_column_of_the_file_settles_what_has_two_readings() -> None:
    for other, decimal in (("26,5", ","), ("26.5", ".")):
        assert forms_of({"a": [other], "b": ["2.010", "1.821"]}, delimiter=";")["b"].decimal == decimal
    assert forms_of({"a": ["26,5"], "b": ["962", "1.238"]}, delimiter=";")["b"].decimal == ","
    assert forms_of({"x": ["1.238", "962"]}, typed=["x"], delimiter=";") == {"x": Form()}, "JSON's own numbers"


def test_a_target_may_have_leading_zeros() -> None:
    assert forms_of({"x": ["007", "5"]}, target="x") == {"x": Form()}
    assert TableCells({"x": Form()}, "x").text("x", "007") == "7"
    assert TableCells({"x": Form()}).text("x", "007") == "007", "a name, as for data.numbers"


KINDS = ("csv", "tsv", "euro.csv", "json", "jsonl", "parquet", "arrow", "saved", "dataset", "frame", "list")


def table(rows: int = 24) -> pd.DataFrame:
    days = pd.date_range("2024-01-01", periods=rows, freq="D").as_unit("us")
    return pd.DataFrame(
        {
            "when": days,
            "at": days + pd.Timedelta(minutes=90),
            "member": [bool(i % 3) for i in range(rows)],
            "count": [float(i) if i % 5 else None for i in range(rows)],
            "share": np.array([i / 10 for i in range(rows)], np.float32),
            "size": pd.Categorical([["small", "large"][i % 2] for i in range(rows)]),
            "note": [None if i % 7 == 0 else f"tea, {i} cups" for i in range(rows)],
            "tags": [["x", "y"][: i % 3] for i in range(rows)],
            "price": [10.5 + 3 * i for i in range(rows)],
        }
    )


def written(frame: pd.DataFrame, folder: Path, kind: str) -> Any:
    """The table as a file of a kind, or as rows in memory."""
    path = folder / f"t.{kind}"
    if "share" in frame and kind in ("json", "jsonl", "list"):  # there pandas itself writes 0.1 as 0.1000000015
        frame = frame.assign(share=frame["share"].astype(str).astype(float))
    # Files by tools that know no timestamp, list or category as such
    if kind in ("csv", "tsv"):
        frame.to_csv(path, index=False, sep="\t" if kind == "tsv" else ",")
    elif kind == "euro.csv":
        frame.to_csv(path, index=False, sep=";", decimal=",")
    elif kind in ("json", "jsonl"):
        frame.to_json(path, orient="records", lines=kind == "jsonl", date_format="iso")
    elif kind == "parquet":
        frame.to_parquet(path)
    elif kind == "arrow":
        pyarrow.feather.write_feather(frame, path)
    elif kind in ("saved", "dataset"):
        data = datasets.Dataset.from_pandas(frame, preserve_index=False)
        if kind == "dataset":
            return data
        data.save_to_disk(str(path))
    else:
        return frame if kind == "frame" else frame.to_dict("records")
    return str(path)


def texts_of(given: Any, folder: Path) -> list[Text]:
    """The texts that training reads with the config that `init` writes."""
    if not isinstance(given, str):
        write_records(given, folder / "rows.jsonl", "data.train")
        given = str(folder / "rows.jsonl")
    keys = recognise(given, "price").keys
    return list(read_texts(given, DataConfig.model_validate({"train": given, **keys}), ReadReport()))


@pytest.mark.parametrize("kind", KINDS)
def test_one_table_gives_the_same_texts_from_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    frame = table()
    first = texts_of(written(frame, tmp_path, "parquet"), tmp_path)
    found = texts_of(written(frame, tmp_path, kind), tmp_path)
    assert [text._replace(where="") for text in found] == [text._replace(where="") for text in first]
    assert first[8].text == (
        "when: 2024-01-09\nat: 2024-01-09 01:30:00\nmember: true\ncount: 8\nshare: 0.8\nsize: small\n"
        'note: tea, 8 cups\ntags: ["x", "y"]\nprice: 34.5\n'
    )


def test_single_precision_is_short_in_lists_and_objects_too(tmp_path: Path) -> None:
    kinds = {
        "vector": pa.list_(pa.float32()),
        "half": pa.list_(pa.float16(), 1),
        "pair": pa.struct([("a", pa.float32()), ("b", pa.float64())]),
        "word": pa.dictionary(pa.int8(), pa.float32()),
    }
    few, exact = np.float32(0.1), 0.10000000149011612
    row = {"vector": [few, None], "half": [np.float16(0.1)], "pair": {"a": few, "b": exact}, "word": few, "price": 1.5}
    whole = pa.Table.from_pylist([row] * 3, pa.schema({**kinds, "price": pa.float64()}))
    pyarrow.parquet.write_table(whole, tmp_path / "t.parquet")
    pyarrow.feather.write_feather(whole, tmp_path / "t.arrow")
    data = datasets.Dataset(whole.drop_columns(["half", "word"]))
    frame = pd.DataFrame([{**row, "vector": np.array([few, np.nan], np.float32)}] * 3)
    pair = f'pair: {{"a": 0.1, "b": {exact!r}}}'
    for source, fields in (
        (str(tmp_path / "t.parquet"), ["vector: [0.1, null]", "half: [0.1]", pair, "word: 0.1"]),
        (str(tmp_path / "t.arrow"), ["vector: [0.1, null]", "half: [0.1]", pair, "word: 0.1"]),
        (data, ["vector: [0.1, null]", pair]),
        (frame, ["vector: [0.1, null]", "half: [0.1]", pair, "word: 0.1"]),
        (frame.astype({"word": "float[pyarrow]"})[["word", "price"]], ["word: 0.1"]),
        (frame.astype({"word": "float16"})[["word", "price"]], ["word: 0.1"]),
    ):
        assert texts_of(source, tmp_path)[0].text.splitlines() == [*fields, "price: 1.5"]


def test_numpys_times_are_those_of_python() -> None:
    """`item` and `tolist` make an integer of nanoseconds, as `values` of a DataFrame has them."""
    days = [np.datetime64("2024-01-07", unit) for unit in ("D", "s", "ms", "us", "ns")]
    spans = [np.timedelta64(26, "h"), np.timedelta64(26 * 3600 * 10**9, "ns")]
    rows = [{"x": value} for value in (*days, *spans, np.datetime64("NaT", "ns"), np.timedelta64("NaT"))]
    found = [row["x"] for row in from_memory([*rows, {"x": np.array(days[-1:])}], "rows")]
    assert found == [*["2024-01-07"] * 5, *["1 days 02:00:00"] * 2, None, None, ["2024-01-07"]]
    assert [TableCells({}).text("x", row["x"]) for row in as_rows(rows, "rows")] == [text or "" for text in found[:-1]]


def test_an_index_with_a_name_is_a_column_in_memory_as_in_a_file(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [1, 2, 3], "price": [1.5, 2.5, 3.5]}, index=pd.Index(["a", "b", "c"], name="city"))
    frame.to_csv(tmp_path / "t.csv")
    found, same = (texts_of(source, tmp_path) for source in (frame, str(tmp_path / "t.csv")))
    assert [text.text for text in found] == [text.text for text in same]
    texts = [text.text for text in texts_of(pd.DataFrame({0: ["a", "b"], "price": [1.5, 2.5]}), tmp_path)]
    assert texts == ["0: a\nprice: 1.5\n", "0: b\nprice: 2.5\n"]
    assert found[1].text == "city: b\nx: 2\nprice: 2.5\n"


def test_columns_with_the_same_name_are_refused_in_every_kind_of_file(tmp_path: Path) -> None:
    whole = pa.table([[1, 2], [3, 4], [5.5, 6.5]], names=["a", "a", "price"])
    pyarrow.parquet.write_table(whole, tmp_path / "t.parquet")
    pyarrow.feather.write_feather(whole, tmp_path / "t.arrow")
    (tmp_path / "t.csv").write_text("a,a,price\n1,3,5.5\n2,4,6.5\n", encoding="utf-8")
    of_index = pd.DataFrame({"a": [1], "price": [1.5]}, index=pd.Index([1], name="a"))
    frames = [pd.DataFrame([[1, 3, 5.5]], columns=["a", "a", "price"]), pd.DataFrame({1: [1], "1": [2]}), of_index]
    for source in (*(str(tmp_path / f"t.{kind}") for kind in ("parquet", "arrow", "csv")), *frames):
        with pytest.raises(UserError, match="another name for every column"):
            texts_of(source, tmp_path)


def _seen(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], TableCells]:
    cells = TableCells(forms_in(rows, "rows"))
    return described(rows, cells), cells


TRAINED = [
    {
        "n": str(i),
        "day": "2024-01-07",
        "at": f"2024-01-07 10:20:00+0{1 + i % 2}:00",
        "flag": "true",
        "us": "01/31/2024",
        "word": "x",
        "full": "a",
    }
    for i in range(1, 10)
]

ALL = "all that was learnt from"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"n": "5.0"}, None),
        ({"day": datetime(2024, 5, 1)}, None),
        ({"flag": False}, "column flag: 8 of 8 cells are none of the 1 learnt (false)"),
        ({"n": 500}, f"column n: 8 of 8 numbers are outside of 1 to 9, {ALL}: 500 to 500"),
        ({"n": 13812345678}, f"column n: 8 of 8 numbers are outside of 1 to 9, {ALL}: 13812345678 to 13812345678"),
        ({"at": "2024-01-07T08:20:00Z"}, "column at: times of the zone +00:00, in training +01:00, +02:00"),
        ({"at": "2024-01-07 10:20"}, "column at: times of the zone none, in training +01:00, +02:00"),
        ({"day": "2024-01-07 10:20"}, "column day: times of the zone none, in training no times"),
        ({"full": None}, "column full: 100% of the cells are empty, 0% in training"),
        ({"word": "y"}, "column word: 8 of 8 cells are none of the 1 learnt (y)"),
        ({"word": "7"}, "column word: every cell is a number, which was text in training"),
    ],
)
def test_columns_that_differ_from_training_are_told(change: dict[str, Any], said: str | None) -> None:
    trained, cells = _seen(TRAINED)
    rows = [{**row, **change} for row in TRAINED[:8]]
    assert list(compare(trained, rows, cells)) == ([said] if said else [])
    half = [*TRAINED, {**TRAINED[0], "day": "7 January", "n": "0500"}]
    assert list(compare(trained, half, cells)) == [
        "column n: 1 of 10 cells are not a number such as 1234.5 (e.g. 0500); in training all were",
        "column day: 1 of 10 cells are not a date such as 2024-01-31 (e.g. 7 January); in training all were",
    ], "0500 is left as a name by the prompt, so it is no number outside of the range either"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"n": "many"}, "many in the column n, allowed: a number such as 1234.5 there, as in training"),
        ({"n": "000105"}, "000105 in the column n, allowed: a number such as 1234.5 there, as in training"),
        ({"n": "1_05"}, "1_05 in the column n, allowed: a number such as 1234.5 there, as in training"),
        ({"n": "١٠٥"}, "١٠٥ in the column n, allowed: a number such as 1234.5 there, as in training"),
        ({"n": "26,5"}, "'26,5', allowed: numbers such as 1234.5 in the column 'n'"),
        ({"day": 1704585600000}, "1704585600000 in the column day, allowed: a date such as"),
        ({"day": "07.01.2024"}, "07.01.2024 in the column day"),
        ({"flag": 1}, "1 in the column flag, allowed: true or false there"),
        ({"us": "2024-01-31"}, "2024-01-31 in the column us, allowed: written as 0/0/0 there"),
    ],
)
def test_columns_that_cannot_have_the_same_text_are_refused(change: dict[str, Any], found: str) -> None:
    trained, cells = _seen(TRAINED)
    with pytest.raises(UserError) as met:
        list(compare(trained, [{**row, **change} for row in TRAINED], cells))
    assert f"FILE: found {found}" in str(met.value)


CODES = [{"zip": f"{code:05}", "key": f"0{code}"} for code in (532, 2646, 12646, 90210, 110)]


def test_codes_without_their_zeros_are_told() -> None:
    """A spreadsheet makes 5532 of 05532: another text, so another prompt."""
    trained, cells = _seen(CODES)
    assert [trained[name]["kind"] for name in ("zip", "key")] == ["00000", "0"], "one length, and any"
    assert list(compare(trained, CODES[2:4], cells)) == [], "not every code begins with 0"
    short = [{name: int(cell) for name, cell in row.items()} for row in CODES]
    assert list(compare(trained, short, cells)) == [
        "column zip: 3 of 5 cells are not written as 00000 (e.g. 532); in training all were",
        "column key: every cell is a number, which was text in training",
    ]
    with pytest.raises(UserError, match="found 532 in the column zip, allowed: written as 00000 there"):
        list(compare(trained, short[:2], cells))


def test_what_only_python_reads_as_a_number_is_in_no_range() -> None:
    cells = TableCells({"n": Form()})
    columns = described([{"n": cell} for cell in ("7", "000105", "1_05", "٩٩")], cells)
    assert (columns["n"]["low"], columns["n"]["high"]) == (7.0, 7.0)


@pytest.mark.parametrize("cell", ["0.125", 5])
@pytest.mark.parametrize("unit", [" %", "k€", " Mio", " Lakh", " Million", "만"])
def test_a_number_without_a_unit_that_scales_it_is_not_read(unit: str, cell: Any) -> None:
    """0.125 may be 12.5 %, and 950 is not 950k: a guess would be silently wrong by a factor."""
    trained, cells = _seen([{"x": f"{i}.5{unit}"} for i in range(20)])
    assert list(compare(trained, [{"x": f"3{unit}"}], cells)) == []
    with pytest.raises(UserError, match=rf"numbers such as 1234\.5 ?{unit.strip()} in the column 'x'"):
        list(compare(trained, [{"x": cell}], cells))
    assert _seen([{"x": f"12.5{unit}"}, {"x": 0.125}])[1].forms == {}, "one column of JSON has both"


def _jsonl(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


CHATTED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
PREFERRED: dict[str, tuple[dict[str, Any], dict[str, str] | str]] = {
    "texts": ({"prompt": "q 1", "chosen": "2", "rejected": "3"}, {"prompt_template": "{prompt}\n"}),
    "a question": ({"question": "q", "chosen": "a", "rejected": "b"}, {"prompt_template": "{question}\n"}),
    "no prompt": ({"chosen": "Human: q Assistant: a", "rejected": "b"}, {"text_field": "chosen"}),
    "chats": ({"prompt": "q", "chosen": CHATTED, "rejected": CHATTED}, {"messages_field": "chosen"}),
    "a chat in each": ({"prompt": CHATTED[:1], "chosen": CHATTED[1:], "rejected": CHATTED[1:]}, "preference data with"),
    "a label": ({"prompt": "q", "completion": "a", "label": False}, "preference data: prompt, completion, and label"),
    "completions as chats": ({"prompt": CHATTED[:1], "completion": CHATTED[1:]}, "chats in prompt and completion"),
}


@pytest.mark.parametrize("case", PREFERRED)
def test_preference_data_is_named_and_never_taught_as_a_whole(tmp_path: Path, case: str) -> None:
    record, expected = PREFERRED[case]
    path = _jsonl(tmp_path / "p.jsonl", [record] * 3)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            recognise(path)
        return
    found = recognise(path)
    assert found.name.startswith("preference data, of which chosen is learnt")
    assert expected.items() <= found.keys.items()
    assert "rejected" not in str(found.keys)


def test_the_first_record_does_not_decide(tmp_path: Path) -> None:
    rows = [{"age": i, "income": 10 * i, "colour": "red"} for i in range(20)]
    lacking = [{key: cell for key, cell in rows[0].items() if key != "colour"}, *rows[1:]]
    assert "colour: {colour}" in recognise(_jsonl(tmp_path / "a.jsonl", lacking), "income").keys["prompt_template"]
    late = [*({"age": i, "colour": "red"} for i in range(3)), *rows]
    assert recognise(_jsonl(tmp_path / "b.jsonl", late), "income").keys["on_bad_line"] == "skip"
    for chats in ([{"id": 1}, {"messages": CHATTED}], [{"messages": CHATTED}, {"id": 1, "messages": None}]):
        assert recognise(_jsonl(tmp_path / "c.jsonl", chats)).keys == {"messages_field": "messages"}
    questions = [{"question": "q", "answer": "a"}, {"question": "q", "answer": "b", "source": "x"}]
    assert recognise(_jsonl(tmp_path / "d.jsonl", questions)).keys["text_template"] == "{answer}"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"data": [{"a": 1, "b": 2}, {"a": 2, "b": 3}]}', "one object with the records under the key data"),
        ('{\n "rows": [\n  {"a": 1},\n  {"a": 2}\n ],\n "n": 2\n}', "one object with the records under the key rows"),
        ('{"a": {"0": 1, "1": 2}, "b": {"0": 2, "1": 3}}', "one object with an object of rows for each column"),
        ('{"a": [1, 2], "b": [2, 3]}', "one object with a list for each column"),
        ('{\n"a": ["x", "y"],\n"b": [2, 3]}', "one object with a list for each column"),
    ],
)
def test_a_table_in_one_json_object_is_refused_by_its_cause(tmp_path: Path, text: str, cause: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=cause):
        sample(str(tmp_path / "a.json"))
    (tmp_path / "a.json").write_text('{\n "a": "x",\n "b": 3\n}', encoding="utf-8")
    assert sample(str(tmp_path / "a.json")) == [{"a": "x", "b": "3"}], "one record over several lines"


def test_number_columns_are_checked_and_written_as_they_are_read() -> None:
    forms = {"a": Form(), "b": Form(",", "€"), "c": Form()}
    assert by_form(forms) == {"1234.5": ["a", "c"], "1234,5 €": ["b"]}
    assert DataConfig(train="t", number_columns=by_form(forms)).number_columns == by_form(forms)
    with pytest.raises(UserError, match=r"data\.number_columns: found '12,5' is no number like"):
        given_forms(DataConfig(train="t", number_columns={"12,5": ["a"]}))


def test_an_infinity_is_an_empty_cell_of_a_table_whatever_its_type(tmp_path: Path) -> None:
    pd.DataFrame({"a": [1.0, np.inf], "price": [1.5, 2.5]}).to_parquet(tmp_path / "t.parquet")
    found = recognise(str(tmp_path / "t.parquet"), "price")
    assert found.keys["empty_cell"] == "unknown"
    assert "1 cells are read as empty: inf" in found.notes
    write_records(pd.DataFrame({"a": [1.0, -np.inf], "b": np.float32("inf")}), tmp_path / "t.jsonl", "rows")
    assert sample(str(tmp_path / "t.jsonl"))[1] == {"a": -math.inf, "b": math.inf}, "rows in memory are read alike"
    for value in (np.float32("inf"), -math.inf, Decimal("inf"), "-inf", "Infinity"):
        assert TableCells({"a": Form()}).text("a", value) == ""
    assert TableCells({}).text("note", "Inf") == "Inf", "a word in a column of words"
