"""What the rows that the columns' kinds come from did not have is told: categories, and cells that are no numbers."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cqwen_dist.config import DataConfig
from cqwen_dist.data.cells import TableCells
from cqwen_dist.data.columns import columns_for, described, forms_in
from cqwen_dist.data.load import load_datasets
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.prediction.learnt_table import compare

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


@pytest.mark.parametrize(("empty", "prepared"), [(None, False), ("unknown", True)])
def test_late_cells_that_are_no_numbers_are_counted(
    tmp_path: Path, tokenizer: NumericalAwareTokenizer, empty: str | None, prepared: bool
) -> None:
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
