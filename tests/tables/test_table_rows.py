"""A table's cells, its numeric columns, and its parts, before anything is trained."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.cells import MISSING
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.recipes import recognise
from cqwen_dist.data.records import Extractor
from cqwen_dist.prediction.table import prompts_of
from cqwen_dist.tables.fitting import only_fit
from cqwen_dist.tables.rows import held_out_rows, read_parts, read_table, repeats, split


def written(folder: Path, records: list[dict[str, object]]) -> str:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def cities(rows: int) -> list[dict[str, object]]:
    return [{"city": ["Rome", "Oslo"][i % 2], "age": i // 2, "height": 1.5, "score": i / 4} for i in range(rows)]


def test_parquet_csv_and_jsonl_give_the_same_table(tmp_path: Path) -> None:
    records = cities(24)
    records[3]["age"] = None
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    lines = ["city,age,height,score"]
    lines += [",".join("" if value is None else str(value) for value in record.values()) for record in records]
    (tmp_path / "t.csv").write_text("\n".join(lines), encoding="utf-8")
    tables = [
        read_table(source, "score") for source in (str(path), str(tmp_path / "t.csv"), written(tmp_path, records))
    ]
    assert tables[0].columns == ["city", "age", "height"]
    for table in tables:
        assert table.numeric == ["age", "height"], "an empty cell does not make a column of text"
        assert (table.values() == np.arange(24) / 4).all()
    assert tables[0].rows[4]["age"] == tables[1].rows[4]["age"] == "2"


@pytest.mark.parametrize("numbers", [range(1, 41), range(940, 900, -1), [7 * i % 40 for i in range(40)]])
def test_a_column_that_counts_the_rows_is_left_out_and_named(tmp_path: Path, numbers: Sequence[int]) -> None:
    """New rows have numbers that no row had. In any order: rising, the newest first, or shuffled."""
    records: list[dict[str, object]] = [
        {"id": number, **record} for number, record in zip(numbers, cities(40), strict=True)
    ]
    source = written(tmp_path, records)
    table = read_table(source, "score")
    assert table.columns == ["city", "age", "height"]
    assert "as they count the rows (a template of yours" in table.notes[0]
    assert table.notes[0].endswith(": id")
    assert "id" not in recognise(source, "score").keys["prompt_template"]
    for keeps in ({"wanted": ["id"]}, {"template": "{id}: "}):
        kept = read_table(source, "score", **keeps)  # type: ignore[arg-type]
        assert "id" in kept.columns
        assert not any("count" in note for note in kept.notes)
    only = written(tmp_path, [{"id": record["id"], "score": record["score"]} for record in records])
    assert read_table(only, "score").columns == ["id"], "there is nothing else"
    few = written(tmp_path, [{**record, "id": 3 * int(str(record["id"]))} for record in records])
    assert "id" in read_table(few, "score").columns, "with large gaps it may be any quantity"


def test_rows_without_a_target_and_unnameable_columns_are_dropped_and_counted(tmp_path: Path) -> None:
    records = [{**record, "a:b": 1, "*": 2, "{}": 3, "": 4, r"\nu": 5} for record in cities(30)]
    records[0]["score"] = None
    table = read_table(written(tmp_path, records), "score")
    assert len(table.rows) == 29
    assert table.columns == ["city", "age", "height"]
    assert "1 rows without a score" in table.notes[0]
    assert read_table(written(tmp_path, records), "score", ["age", "age"]).columns == ["age"]
    assert table.notes[1].endswith(r": a:b, *, {}, \nu")


def test_targets_are_written_so_that_training_reads_them_as_numbers(tmp_path: Path) -> None:
    odd = ["13812345678", "1_000", "٣", "007", "+5", " 6 ", "1e3", "2024.10", "-0.0", "9007199254740993"]
    records = cities(20)
    for record, score in zip(records, odd, strict=False):
        record["score"] = score
    table = read_table(written(tmp_path, records), "score")
    assert list(table.values()[: len(odd)]) == [float(score) for score in odd]
    config = DataConfig(train="t", text_template="score: {score}", target_field="score")
    for row in table.rows:
        Extractor(config, Chat(), table.forms)(row, "here")
    assert [row["score"] for row in table.rows[:7]] == ["13812345678", "1000", "3", "7", "5", "6", "1000"]
    assert Extractor(config, Chat(), table.forms)(table.rows[0], "here").text == "score: 13812345678.0"


def test_words_for_empty_cells_are_the_same_in_fit_training_and_predict(tmp_path: Path) -> None:
    records = cities(60)
    for i, word in enumerate(sorted(MISSING)):
        records[i]["age"], records[-1 - i]["city"] = word, f" {word} "
    records[30]["score"] = "NA"
    table = read_table(written(tmp_path, records), "score")
    assert table.numeric == ["age", "height"], "such a word does not make a column of text"
    assert "1 rows without a score" in table.notes[0]
    assert [row["city"] for row in table.rows].count("") == len(MISSING)
    prompts = prompts_of("{city}, {age}: ", ["city", "age"], records, "unknown")
    assert [prompt.partition(",")[0] for prompt in prompts].count("unknown") == len(MISSING)
    read = {"train": "t", "prompt_template": "{city}, {age}: ", "text_template": "{score}", "empty_cell": "unknown"}
    of_table, of_texts = (Extractor(DataConfig(**read, **keys), Chat()) for keys in ({"target_field": "score"}, {}))
    for number, record in enumerate(records):
        if number != 30:
            assert of_table(record, "here").text.startswith(prompts[number])
    word = max(MISSING)
    assert word in of_texts({"city": word, "age": 1, "score": 2}, "here").text, "a text may say so"


@pytest.mark.parametrize(
    ("change", "key", "found"),
    [
        ({"target": "price"}, "--target", "price"),
        ({"wanted": ["town"]}, "--text-columns", "town"),
        ({"score": "dear"}, "--target", "dear"),
        ({"rows": 19}, "FILE", "19 rows"),
        ({"score": -1.7976931348623157e308}, "--target", "-1.79.*up to 1e30"),
        ({"more": {"low_90": 1}}, "FILE", "a column low_90"),
    ],
)
def test_what_cannot_be_fitted_is_one_line(tmp_path: Path, change: dict[str, object], key: str, found: str) -> None:
    records = cities(int(str(change.get("rows", 30))))
    if "score" in change:
        records = [{**record, "score": change["score"]} for record in records]
    records = [{**record, **change.get("more", {})} for record in records]  # type: ignore[dict-item]
    wanted = [str(name) for name in change.get("wanted", [])]  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=found) as met:
        read_table(written(tmp_path, records), str(change.get("target", "score")), wanted)
    assert f"{key}: found" in str(met.value)


def test_the_parts_of_a_split_are_disjoint_complete_and_round_trip(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, cities(101)), "score")
    parts = split(101, seed=3, test_fraction=0.2)
    assert sorted(np.concatenate(parts)) == list(range(101))
    assert len(parts.test) == 20
    assert min(parts.test[:10]) < 50 < max(parts.test[:10]), "where time is short the first are judged: of any place"
    assert not (split(101, 4, 0.2).test == parts.test).all()
    parts.write(tmp_path / "table", table)
    again, same = read_parts(tmp_path / "table", table.forms)
    assert again._replace(rows=[], written=[], notes=[]) == table._replace(rows=[], written=[], notes=[])
    for before, after in zip(parts, same, strict=True):
        assert [table.rows[row] for row in before] == [again.rows[row] for row in after]


def test_a_published_split_is_taken_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "splits.json"
    path.write_text(json.dumps([[0, 1, 2], [5, 7, 9]]), encoding="utf-8")
    found = held_out_rows(f"{path}#1", 40)
    assert found == [5, 7, 9]
    parts = split(40, 0, 0.2, found)
    assert sorted(parts.test) == [5, 7, 9]
    assert not {5, 7, 9} & {*parts.train, *parts.valid}
    with pytest.raises(UserError, match="--split"):
        held_out_rows(f"{path}#1", 8)  # row 9 is none


@pytest.mark.parametrize(("copies", "given"), [(2, None), (5, None), (3, [0, 7, 9])])
def test_equal_rows_stay_in_one_part(tmp_path: Path, copies: int, given: list[int] | None) -> None:
    draw = np.random.default_rng(copies)
    records = [{"name": f"x{i}", "score": int(draw.integers(1000))} for i in range(40)] * copies
    table = read_table(written(tmp_path, [records[i] for i in draw.permutation(len(records))]), "score")
    parts = split(len(table.rows), 0, 0.2, given, equal=table.equal())
    names = [{table.rows[row]["name"] for row in part} for part in parts]
    assert all(names)
    assert not names[0] & names[1]
    (note,) = repeats(table.equal(), parts)
    assert note.startswith(f"{40 * (copies - 1)} rows repeat another row; ")
    if given is None:
        assert not names[2] & (names[0] | names[1])
        assert note.endswith("all equal ones are in one part")
    else:
        assert note.endswith("test rows are learnt from too, by --split")
    assert repeats([*range(120)], split(120, 0, 0.2, equal=[*range(120)])) == []
    with pytest.raises(UserError, match="rows that are all equal"):
        split(30, 0, 0.2, equal=[0] * 30)


@pytest.mark.parametrize(("usual", "odd"), [("$1,200", "call us"), ("1.234,5", "1,234.5"), (5, True)])
def test_a_target_with_an_odd_cell_is_refused_by_that_cell(tmp_path: Path, usual: object, odd: object) -> None:
    records: list[dict[str, object]] = [{**record, "score": usual} for record in cities(24)]
    records[2]["score"], records[7]["score"] = None, odd
    with pytest.raises(UserError, match=r"record 8: --target: found .*all in one form, such as"):
        read_table(written(tmp_path, records), "score")


def test_infinities_are_empty_cells_whatever_the_file(tmp_path: Path) -> None:
    """As Excel's #DIV/0! is. The column stays one of numbers, and a note counts them."""
    records = [{**record, "ratio": {3: np.inf, 5: -np.inf}.get(i, i / 2)} for i, record in enumerate(cities(24))]
    path, sheet = tmp_path / "t.parquet", tmp_path / "t.csv"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    pandas.DataFrame(records).to_csv(sheet, index=False)
    for source in (str(path), str(sheet), written(tmp_path, records)):
        table = read_table(source, "score")
        assert "ratio" in table.numeric, source
        assert [row["ratio"] for row in table.rows[2:6]] == ["1", "", "2", ""]
        assert "2 cells are read as empty: inf, -inf" in table.notes


def test_two_fits_at_once_into_one_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "fits" / "cars"
    with (
        only_fit(folder),
        pytest.raises(UserError, match=r"--out: found another cqwen fit at work on .*cars, allowed: its end"),
        only_fit(folder),
    ):
        pass
    with only_fit(folder):  # the first has ended
        assert not folder.exists()
    assert not list((tmp_path / "fits").iterdir())
    folder.mkdir()
    monkeypatch.chdir(folder)
    with only_fit(Path(".")), pytest.raises(UserError), only_fit(folder):
        pass
