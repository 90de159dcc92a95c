"""One table, in any kind of file, is predicted alike to the bit; a table in another form is told or refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from data.test_cells import KINDS, table, written
from support.exported import tiny_pair, write_folder

from cqwen_dist import api
from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.columns import columns_for
from cqwen_dist.data.prepare import tokenise
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_texts
from cqwen_dist.generate.continuation import encoded
from cqwen_dist.heads.intervals import LEVELS
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.prediction.learnt_table import OUTSIDE, LearntRange, LearntTable
from cqwen_dist.prediction.table import NUMBER_COLUMNS


def test_all_that_is_known_of_a_column_is_kept(tmp_path: Path) -> None:
    """A note that is dropped is a difference that `predict` no longer tells."""
    keys = {"prompt_template": "{when} {at} {share} {note}:", "text_template": " {price}"}
    data = DataConfig(train=written(table().head(8), tmp_path, "csv"), target_field="price", **keys)
    columns = columns_for(data)
    assert any(column["zones"] for column in columns.values()), "a column of times is among them"
    assert LearntTable.model_validate({"data": data.model_dump(), "columns": columns}).described() == columns


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return tiny_pair()


@pytest.fixture
def learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that learnt from the CSV file."""
    keys = {"prompt_template": "{when} {member} {count} {share} {size}:", "text_template": " {price}"}
    data = DataConfig(
        train=written(table().head(8), tmp_path, "csv"), target_field="price", empty_cell="unknown", **keys
    )
    columns = columns_for(data)
    known = LearntTable.model_validate({"data": data.model_dump(), "columns": columns})
    monkeypatch.setattr(api, "_learnt_table", lambda _: known)


def predicted(pair: Any, rows: Any, said: list[str], **options: Any) -> list[Any]:
    found = api.predict(pair, rows, digits=17, batch_size=8, say=said.append, **options)
    return [[row[name] for name in NUMBER_COLUMNS] for row in found]


@pytest.mark.usefixtures("learnt")
def test_every_kind_of_file_is_predicted_alike_to_the_bit(pair: Any, tmp_path: Path) -> None:
    frame, said = table().head(8).drop(columns=["at", "note", "tags"]), list[str]()
    first = predicted(pair, written(frame, tmp_path, "csv"), said)
    assert len({str(row) for row in first}) > 1
    for kind in KINDS[1:]:
        options = {"decimal_comma": None} if kind != "euro.csv" else {"decimal_comma": True}
        assert predicted(pair, written(frame, tmp_path, kind), said, **options) == first, kind
    assert said == []


@pytest.mark.usefixtures("learnt")
def test_predict_tells_and_refuses_what_differs(pair: Any, tmp_path: Path) -> None:
    frame, said = table().head(8).drop(columns=["at", "note", "tags"]), list[str]()
    predicted(pair, frame.assign(count=900.0), said)
    assert said == ["column count: 8 of 8 numbers are outside of 1 to 7, all that was learnt from: 900 to 900"]
    for name, cell in (("when", 1704585600000), ("when", "07.01.2024"), ("count", "many"), ("member", "yes")):
        with pytest.raises(UserError, match=f"^rows: found {cell} in the column {name}"):
            predicted(pair, frame.assign(**{name: cell}), said)
    with pytest.raises(UserError, match=r"numbers such as 1234\.5 in the column 'count'"):
        predicted(pair, written(frame, tmp_path, "euro.csv"), said)


@pytest.mark.usefixtures("learnt")
def test_one_bad_cell_costs_one_row(pair: Any, tmp_path: Path) -> None:
    """The others are predicted as without it, and the message has the place and the way out."""
    frame, said = table().head(8).drop(columns=["at", "note", "tags"]).astype({"count": object}), list[str]()
    whole = predicted(pair, written(frame, tmp_path, "csv"), said)
    frame.loc[3, "count"] = "12,5"
    for kind, place in (("csv", f"{tmp_path / 't.csv'}:5"), ("jsonl", f"{tmp_path / 't.jsonl'}:4"), ("list", "row 4")):
        found = predicted(pair, written(frame, tmp_path, kind), said)
        assert found[3] == [None] * len(NUMBER_COLUMNS)
        assert found[:3] + found[4:] == whole[:3] + whole[4:]
        told, reason = said
        assert told == "column count: 1 of 6 cells are not a number such as 1234.5 (e.g. 12,5); in training all were"
        allowed = "numbers such as 1234.5 in the column 'count' (data.number_columns, or predict's --decimal-comma)"
        assert reason == f"1 of 8 rows have no prediction, such as {place}: found '12,5', allowed: {allowed}"
        said.clear()
    frame.loc[3, "count"] = b"\xff"
    assert [row[0] is None for row in predicted(pair, frame.to_dict("records"), said)] == [i == 3 for i in range(8)]
    assert "row 4: found b'\\xff', allowed: text, a number" in said[-1]
    frame.loc[3, "count"] = "000105"
    assert None not in predicted(pair, frame, said)[3], "a name, read as in training"
    assert "1 of 6 cells are not a number such as 1234.5 (e.g. 000105)" in said[-1]


@pytest.mark.parametrize(
    "keys",
    [
        {"prompt_template": "{a} {b}\n", "text_template": "\ny: {y}"},
        {"prompt_template": "{a} {b} ", "text_template": "  y {b} {y} of"},
        {"text_template": "{*}y: {y}"},
    ],
)
def test_a_rows_prompt_has_ids_that_training_had_before_target(pair: Any, tmp_path: Path, keys: dict[str, Any]) -> None:
    """Whatever the templates; and {*} stands for the same columns, though records lack some or have another order."""
    records = [{"b": "é <<3*2=6>>", "a": 5, "y": 7}, {"y": 8.5, "a": None, "b": "x"}, {"y": 9, "b": "-2"}]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    data = DataConfig.model_validate({"train": str(path), "target_field": "y", "empty_cell": "unknown", **keys})
    report, tokenizer = ReadReport(), pair[1]
    dataset = tokenise(list(read_texts(str(path), data, report)), tokenizer, data)
    learnt = LearntTable.model_validate({"data": data.model_dump(), "columns": report.columns})
    table = [{name: record.get(name) for name in ("y", "a", "b")} for record in records]
    prompts, _ = learnt.prompts(table, learnt.extractor(), {}, print)
    for row, prompt in enumerate(prompts):
        ids, values = encoded(tokenizer, prompt)
        text = dataset[row][0]
        assert text.ids.tolist()[: len(ids) + 1] == [*ids, tokenizer.num_token_id]
        assert text.values.tolist()[: len(ids) + 1] == [*values, records[row]["y"]]
    if "{*}" in str(data):
        list(read_texts(str(path), data.model_copy(update={"empty_cell": None, "on_bad_line": "skip"}), report))
        assert report.skipped == {"empty cell": 1, "missing field": 1}


def test_what_a_run_notes_of_its_columns_is_how_it_reads_them(tmp_path: Path) -> None:
    """Where the start learns from data.eval too, its cells widen ranges; they change neither forms nor columns."""
    (tmp_path / "t.csv").write_text("a,y\n1,2\n3,4\n", encoding="utf-8")
    (tmp_path / "e.csv").write_text("a,y,more\nmany,9,x\n5,8,x\n", encoding="utf-8")
    data = DataConfig.model_validate(
        {"train": str(tmp_path / "t.csv"), "eval": str(tmp_path / "e.csv"), "recipe": "table", "target_field": "y"}
    )
    both = columns_for(data, with_eval=True)
    assert {name: column["form"] for name, column in both.items()} == {"a": "1234.5", "y": "1234.5"}
    assert (both["a"]["high"], both["y"]["high"], columns_for(data)["y"]["high"]) == (5.0, 9.0, 4.0)


def test_export_is_evaluated_on_rows_of_its_table(pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on their column `text` alone; nor in the forms of a run that happens to be in the default folder."""
    monkeypatch.chdir(tmp_path)
    keys = {"prompt_template": "{text}:", "text_template": " {price}", "target_field": "price", "sequence_length": 40}
    columns = {"text": {"kind": "text", "empty": 0.0}, "price": {"kind": "number", "empty": 0.0, "form": "1234,5"}}
    folder = write_folder(tmp_path / "export", *pair)
    (folder / "table.json").write_text(json.dumps({"data": {"train": "table.json", **keys}, "columns": columns}))
    (tmp_path / "runs" / "default").mkdir(parents=True)
    (tmp_path / "runs" / "default" / "start.json").write_text('{"columns": {}}')
    (tmp_path / "t.csv").write_text("text;price\n" + "tea;1.234\n" * 3)
    found = api.evaluate(folder, tmp_path / "t.csv")
    assert found["eval/numbers"] == 3
    written = api.evaluate(folder, [{"text": "tea", "price": 1234}] * 3)
    assert written["eval/reg_mdae"] == found["eval/reg_mdae"], "1.234 is 1234, as in training"


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
