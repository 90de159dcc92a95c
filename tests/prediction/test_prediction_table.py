"""A table in, predictions out: prompts from cells, numbers as generating writes them, choices, and what is refused."""

import copy
import csv
import io
from pathlib import Path

import pytest
import torch
from support.exported import tiny_pair

from cqwen_dist.api import predict
from cqwen_dist.config import UserError
from cqwen_dist.data.recipes import records_in
from cqwen_dist.data.text_files import write_table
from cqwen_dist.generate.continuation import continue_text
from cqwen_dist.generate.decisions import choose
from cqwen_dist.prediction.table import NUMBER_COLUMNS, predict_numbers, predict_rows, prompts_of

TABLE = 'item,amount,note\ntea,3.5,"a, b"\nmilk,12,\n"rice ""x""",-4,{z}\n'
TEMPLATE = "{item} costs {amount} and bread costs"


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    path.write_text(TABLE, encoding="utf-8-sig")
    return path


def test_rows_become_prompts(table: Path) -> None:
    rows = records_in(str(table))
    assert prompts_of("{{{note}}} {item}: {item}", list(rows[0]), rows, "") == [
        "{a, b} tea: tea",
        "{} milk: milk",
        '{{z}} rice "x": rice "x"',
    ]


def test_a_prediction_is_the_first_generated_number(pair, table: Path) -> None:
    model, tokenizer = pair
    out = io.StringIO()
    write_table(predict(pair, table, TEMPLATE, digits=17, batch_size=2), out)
    written = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert list(written[0]) == ["item", "amount", "note", *NUMBER_COLUMNS]
    assert [row["note"] for row in written] == ["a, b", "", "{z}"]
    prompts = prompts_of(TEMPLATE, ["item", "amount"], records_in(str(table)))
    for row, prompt in zip(written, prompts, strict=True):
        text = continue_text(model, tokenizer, [prompt], max_new_tokens=8)[0]
        if not text.numbers:
            assert row["predicted"] == ""
            continue
        first = text.numbers[0]
        assert float(row["predicted"]) == pytest.approx(first.value, rel=1e-5)
        assert float(row["p_num"]) == pytest.approx(first.p_num, rel=1e-4)
        for level in ("0.5", "0.9", "0.95"):
            ends = [float(row[f"{end}_{float(level) * 100:g}"]) for end in ("low", "high")]
            assert ends == pytest.approx(first.intervals[level], rel=1e-3)
    assert any(row["predicted"] for row in written)
    one_by_one = list(predict_numbers(model, tokenizer, prompts, batch_size=1, digits=17))
    for alone, row in zip(one_by_one, written, strict=True):
        assert str(alone["predicted"] or "")[:6] == row["predicted"][:6]


def test_prompts_leave_room_for_a_number_in_the_context(pair) -> None:
    room = pair[0].config.base_config.max_position_embeddings
    texts = {len(pair[1].encode("a" * n)[0]): "a" * n for n in range(1, 9 * room)}
    (found,) = predict_rows(*pair, [{}], [texts[room - 1]], within=0)
    assert found["predicted"] is not None
    with pytest.raises(UserError, match=f"record 2: FILE: found '{room} tokens', allowed: 1 to {room - 1}"):
        list(predict_rows(*pair, [{}, {}], ["tea", texts[room]], within=0))


def test_rows_that_cannot_be_read_have_empty_cells_and_are_counted(pair) -> None:
    """Too long, empty, a lone surrogate, no text: the others are predicted, also beside a numeral that stays text."""
    texts = ["tea", "long " * 500, "", "1e999", "\ud800", "coffee 5", {1}]
    rows = [{"a": text} for text in texts]
    said: list[str] = []
    found = predict(pair, rows, "{a}", say=said.append)
    assert [row["p_num"] is not None for row in found] == [True, False, False, True, False, True, False]
    assert all(found[i][name] is None for i in (1, 2, 4, 6) for name in NUMBER_COLUMNS)
    (alone,) = predict(pair, rows[:1], "{a}")
    for name in alone:  # six digits are written
        same = pytest.approx(found[0][name], rel=1e-4) if isinstance(alone[name], float) else found[0][name]
        assert alone[name] == same or name == "p_num"
    assert said[0].startswith("4 of 7 rows have no prediction, such as row 2: found '2500 tokens', allowed: ")
    chosen = predict(pair, rows, "{a}", options=[" and", " for"], say=said.append)
    assert [row["chosen"] is not None for row in chosen] == [True, False, False, True, False, True, False]
    with pytest.raises(UserError, match="row 1: found an empty cell in the column a"):
        predict(pair, rows[2:5:2], "{a}")


def test_a_row_without_a_number_has_empty_cells_and_says_how_likely_one_was(pair) -> None:
    model, tokenizer = copy.deepcopy(pair[0]), pair[1]
    with torch.no_grad():
        model.model.action.threshold[tokenizer.num_token_id] = 60.0
    (row,) = predict_numbers(model, tokenizer, ["tea costs"])
    assert row["predicted"] is row["low_90"] is None
    assert 0.0 < row["p_num"] < 0.1
    (row,) = predict_numbers(model, tokenizer, ["tea costs"], within=0)
    (before,) = predict_numbers(*pair, ["tea costs"], within=0)
    assert row["p_num"] < before["p_num"]
    assert {**row, "p_num": 0.0} == {**before, "p_num": 0.0}  # Y, whatever words are likelier


def test_predicts_choices_with_a_rejection_threshold(pair, table: Path) -> None:
    model, tokenizer = pair
    options = [" and", " for"]
    prompts = prompts_of(TEMPLATE, ["item", "amount"], records_in(str(table)))
    expected = choose(model, tokenizer, prompts, options)
    for limit in (0.0, 1.0):
        written = predict(pair, table, TEMPLATE, options=options, reject_below=limit)
        assert [row["chosen"] for row in written] == [(c.option if limit == 0.0 else None) for c in expected]
        assert written[0]["p  and"] == pytest.approx(expected[0].p[" and"], rel=1e-4)


@pytest.mark.parametrize(
    ("text", "template", "match"),
    [
        ("a,a\n1,2\n", "{a}", "a table with another name for every column"),
        ("a,b\n", "{a}", "a table with a row or more"),
        ("a,b\n1\n", "{a}", r"t\.csv:2: wrong number of cells: found 1, allowed: 2"),
        ("a,b\n1,2\n", "{c} is", "--template: found 'c', allowed: only columns in braces there, out of a, b"),
        ("a,p_num\n1,2\n", "{a}", "a column p_num"),
    ],
)
def test_wrong_tables_and_templates_are_refused(pair, tmp_path: Path, text: str, template: str, match: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=match):
        predict(pair, path, template)
