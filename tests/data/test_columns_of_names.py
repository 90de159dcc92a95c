"""Columns whose digits are names stay text, in every kind of file; what is read as numbers all the same is told."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cqwen_dist.config import DataConfig
from cqwen_dist.data.cells import Literal, TableCells
from cqwen_dist.data.columns import columns_for, described, forms_in
from cqwen_dist.data.load import load_datasets
from cqwen_dist.data.number_forms import Form, forms_of
from cqwen_dist.data.recipes import recognise
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_texts
from cqwen_dist.prediction.learnt_table import compare

ORDER = 1610521604143693812


@pytest.mark.parametrize(
    "cells",
    [
        *([str(ORDER), "5"], ["1,610,521,604,143,693,812"], ["110101199003070011"], ["9007199254740993"], ["1e400"]),
        *(["+491701234567", "+12025550123"], ["+44 207 946 095"], ["+49 170 1234567"], ["978-3-16-148410-0"]),
    ],
)
def test_names_of_digits_make_no_column_of_numbers(cells: list[str]) -> None:
    assert forms_of({"x": cells}) == {}


def test_long_numbers_and_signs_are_numbers() -> None:
    for cells in (
        ["9007199254740992"],
        ["1e22", "5"],
        ["+1500000000", "-3"],
        ["+1,234,567,890"],
        ["123.45678901234567"],
    ):
        assert forms_of({"x": cells}) == {"x": Form()}


@pytest.mark.parametrize("kind", [int, np.int64, str, lambda number: Literal(str(number))])
def test_ids_are_names_whatever_the_files_type(kind: Any) -> None:
    rows = [{"id": kind(ORDER + i), "some": kind(ORDER if i else 5), "n": kind(i)} for i in range(9)]
    forms = forms_in(rows, "rows")
    assert forms == {"n": Form()}
    cells = TableCells({**forms, "id": Form()})  # as a config of `init` had it once
    trained = described(rows, cells)
    assert [trained[name]["kind"] for name in ("id", "some", "n")] == ["0", "0", "number"]
    assert list(compare(trained, rows, cells)) == []
    assert list(compare(trained, [*rows[1:], {"id": ORDER, "some": ORDER, "n": kind(ORDER)}], cells)) == [
        f"column n: 1 of 9 cells are not a number such as 1234.5 (e.g. {ORDER}); in training all were"
    ], "a name is outside of no range"


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (["1.1", "1.10", "2.0"], "1.10 is read as 1.1; for versions, write v1.10"),
        (["3.9", "3.20"], "3.20 is read as 3.2; for versions, write v3.20"),
        (["3.9", "?", "3.20"], "3.20 is read as 3.2; for versions, write v3.20"),
        (["9780306406157", "9783161484100"], "ISBNs are read as numbers; with hyphens they stay text"),
        (["9780306406157", "12"], None),
        (["1.50", "2.25"], None),
        (["1.5", "2.25"], None),
        (["4", "3.50"], None),
    ],
)
def test_versions_and_bare_isbns_are_told(tmp_path: Path, cells: list[str], told: str | None) -> None:
    (tmp_path / "t.csv").write_text("release,y\n" + "".join(f"{cell},{i}\n" for i, cell in enumerate(cells)))
    notes = [note for note in recognise(str(tmp_path / "t.csv"), "y").notes if note.startswith("release")]
    assert notes == ([f"release: {told}"] if told else [])


def test_a_target_that_is_learnt_rounded_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"x": i, "y": ORDER + i}) + "\n" for i in range(6)))
    found = recognise(str(path), "y")
    assert f"6 numbers of y are learnt rounded, as float64 holds them: {ORDER}" in found.notes
    config, report = DataConfig.model_validate({"train": str(path), **found.keys}), ReadReport()
    assert {text.text.splitlines()[1] for text in read_texts(str(path), config, report)} == {
        "y: 1.6105216041436938e+18"
    }
    assert "not used: 6 x digits of y that float64 does not hold" in report.lines()
    columns = columns_for(config)
    assert columns["y"]["low"] == columns["y"]["high"] == float(ORDER), "so predictions are held to its range"
    rows, cells = [{"x": 1, "y": ORDER}], TableCells({"x": Form(), "y": Form()}, "y")
    assert list(compare(columns, rows, cells)) == []


CITIES = [{"city": city, "code": f"0{i % 3}", "note": f"{city} {i}"} for i, city in enumerate(["Rome", "Oslo"] * 9)]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (
            [{"city": "Z\u00fcrich"}, {"city": "Bern"}],
            "city: 2 of 2 cells are none of the 2 learnt (Z\u00fcrich, Bern)",
        ),
        ([{"city": "Rome"}, {"city": "rome"}], "city: 1 of 2 cells are none of the 2 learnt (rome)"),
        (
            [{"city": "Osl\u043e"}],
            "city: 1 of 1 cells are none of the 2 learnt (Osl\u043e), with letters of another script: Cyrillic",
        ),
        ([{"city": c} for c in "abcd"], "city: 4 of 4 cells are none of the 2 learnt (a, b, c, ...)"),
        ([{"code": "03"}], "code: 1 of 1 cells are none of the 3 learnt (03)"),
        ([{"note": "Bern 7"}], None),
        ([{"city": "Oslo"}, {"city": ""}], "city: 50% of the cells are empty, 0% in training"),
    ],
)
def test_categories_that_training_did_not_have_are_told(cells: list[dict[str, Any]], said: str | None) -> None:
    read = TableCells(forms_in(CITIES, "rows"))
    trained = described(CITIES, read)
    assert "values" not in trained["note"], "most cells differ: a text, no category"
    assert list(compare(trained, cells, read)) == ([f"column {said}"] if said else [])


def test_values_are_kept_only_if_all_rows_were_looked_at(tmp_path: Path) -> None:
    """A category of a later row was learnt too, so to call it unseen would be wrong."""
    path = tmp_path / "t.csv"
    for rows, known in ((8_999, True), (10_001, False)):
        path.write_text("city,y\n" + "Rome,1\nOslo,2\n" * (rows // 2) + "Bern,3\n", encoding="utf-8")
        config = DataConfig(train=str(path), prompt_template="{city}: ", text_template="{y}", target_field="y")
        values = columns_for(config)["city"].get("values")
        assert values == (["Bern", "Oslo", "Rome"] if known else None)


@pytest.mark.parametrize(("empty", "prepared"), [pytest.param(None, False, marks=pytest.mark.slow), ("unknown", True)])
def test_late_cells_that_are_no_numbers_are_counted(tmp_path, tokenizer, empty, prepared) -> None:
    """Of the columns, only the first 10,000 rows are looked at. What stands behind is text in the prompt."""
    path, lines = tmp_path / "late.csv", [f"{i % 70},{i % 9}" for i in range(10_500)]
    lines[10_200], lines[10_300], lines[10_400] = "12 kg,1", "0500,2", "n/a,3"
    path.write_text("\n".join(["x,y", *lines]), encoding="utf-8")
    keys: dict[str, Any] = {"prompt_template": "x: {x}\n", "text_template": "{y}", "target_field": "y"}
    keys |= {"cache_dir": str(tmp_path / "cache") if prepared else None}
    reading = load_datasets(DataConfig(train=str(path), empty_cell=empty, **keys), tokenizer).reading
    odd = 2 if empty else 3  # "n/a" is a word for an empty cell, and the prompt has it if nothing stands for one
    assert reading.lines() == [
        "numbers: as 1234.5 in x, y (data.number_columns)",
        f"column x: {odd} cells are no number and stay text, first at {path}:10202",
    ]
    assert ReadReport(**asdict(reading)).lines() == reading.lines()
