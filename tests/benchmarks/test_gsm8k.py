"""GSM8K's answers: what counts as solved, what as miscalculated, and a run from the command line."""

import json
from pathlib import Path

import pytest
from support.exported import tiny_pair, write_folder
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.gsm8k import answer_of, calculated, judged, read_problems, value_of
from cqwen_dist.config.errors import UserError

PROBLEM = {"question": "Tea costs 3.5. Two?", "answer": "2 * 3.5 = <<2*3.5=7>>7\n#### 7"}


@pytest.mark.parametrize(
    ("text", "answer"),
    [("so\n#### 1,234", 1234), ("#### 7 and 8", 7), ("is 5, then 6.", 6), ("-2", -2), ("none", None), ("#### x", None)],
)
def test_the_answer_is_behind_the_last_mark_or_the_last_number(text: str, answer: float | None) -> None:
    assert answer_of(text) == answer


def test_expressions_are_calculated_again() -> None:
    assert value_of("2 x (3 + 4) ÷ 7") == 2
    assert value_of("-4+1,000") == 996
    assert value_of("48") is None
    assert value_of("-48") is None
    assert value_of("3 / 0") is None
    assert value_of("__import__('os')") is None
    assert calculated("He pays 3 * $4 = $12, then 10/3=3.33, and 5 - 2 = 4. In 2020 = 2020.") == (3, 1)
    assert calculated("-6 - -2 = -4 and 8-6 = 2") == (2, 0)


def test_errors_have_kinds() -> None:
    problems = [("q", "a", 7.0)] * 4
    found = judged(["3+4=7 #### 7", "3+4=8 #### 8", "3+5=8 #### 8", "I do not know 7 or 8"], problems)
    assert {kind: found[kind] for kind in ("solved", "arithmetic", "plan", "unanswered")} == dict.fromkeys(
        ("solved", "arithmetic", "plan", "unanswered"), 1
    )
    assert (found["share"], found["expressions"], found["miscalculated"]) == (0.25, 3, 1)


def test_a_folder_answers_problems(tmp_path: Path) -> None:
    folder, data = write_folder(tmp_path / "model", *tiny_pair()), tmp_path / "test.jsonl"
    data.write_text("".join(json.dumps(PROBLEM) + "\n" for _ in range(3)))
    asked = ["gsm8k", str(folder), "--data", str(data), "--new-tokens", "6", "--batch", "2", "--json"]
    found = CliRunner().invoke(app, asked)
    assert found.exit_code == 0, found.output
    (row,) = json.loads(found.stdout)["rows"]
    assert (row["problems"], len(row["texts"])) == (3, 3)
    assert row["solved"] + row["unanswered"] + row["arithmetic"] + row["plan"] == 3
    data.write_text('{"question": "Tea?", "answer": "7"}\n')
    with pytest.raises(UserError, match=r"test.jsonl:1: --data: found another record, allowed: GSM8K's fields"):
        read_problems(data, 5)
