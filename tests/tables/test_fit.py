"""`cqwen fit` on a table of words and numbers, from the command to the prediction of further rows."""

import csv
import gzip
import html
import json
import random
from pathlib import Path

import pytest
from support.runs import cqwen_forked

from cqwen_dist.api import predict
from cqwen_dist.config import UserError, load_config
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.tables.fit_request import FitRequest
from cqwen_dist.tables.fitting import prepare
from cqwen_dist.tools.export.export import export


def write_table(path: Path, rows: int = 60) -> Path:
    """score = age + 40 in Rome; every ninth height is missing."""
    draw = random.Random(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["city", "age", "height", "score"])
        for i in range(rows):
            city, age = draw.choice(["Rome", "Oslo"]), draw.randint(10, 50)
            writer.writerow(
                [city, age, "" if i % 9 == 0 else f"{draw.uniform(1.5, 2):.2f}", age + 40 * (city == "Rome")]
            )
    return path


@pytest.fixture(scope="module")
def fitted(one_rank: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[object]]:
    """The folder of a fit, and its command."""
    folder = tmp_path_factory.mktemp("fit")
    command: list[object] = ["fit", write_table(folder / "people.csv"), "--target", "score"]
    command += ["--base", one_rank / "base", "--out", folder / "out", "--minutes", "6", "--seeds", "2"]
    done = cqwen_forked(*command)
    assert done.returncode == 0, done.stderr
    assert "always the median" in done.stdout
    assert "true" in done.stdout, "five rows in words"
    return folder / "out", command


def test_fit_is_judged_on_unseen_rows(fitted: tuple[Path, list[object]]) -> None:
    out, _ = fitted
    found = json.loads((out / "fit.json").read_text(encoding="utf-8"))
    names = [
        "CausalQwen",
        "always the median",
        "ridge, numeric columns",
        "ridge, TF-IDF and one-hot",
    ]
    names += ["ridge, TF-IDF of words and pairs", "gradient boosting"]
    assert [name for name in found["results"] if name in names] == names
    assert all("error" in found["results"][name]["fitted_to"] for name in names[1:])
    assert found["best"] == min(found["results"], key=lambda name: found["results"][name]["mae"])
    assert found["verdict"].startswith(f'Use "{found["best"]}".')
    start = json.loads((out / "run" / "start.json").read_text(encoding="utf-8"))["calibration"]
    assert f"Law of the numbers: {start['law']}." in found["verdict"]
    assert ", with the least CRPS on rows left out (" in start["law"]
    assert 0 <= found["results"]["CausalQwen"]["coverage_90"] <= 1
    with (out / "predicted.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == found["rows"] == 12
    errors = [abs(float(row["predicted"]) - float(row["score"])) for row in rows]
    for name, by in (("predicted", "predicted"), ("width_90", "width")):
        (decile,) = found["deciles"][name]
        assert decile["rows"] == 12, f"too few for ten groups by {by}"
        assert decile["coverage_90"] == found["results"]["CausalQwen"]["coverage_90"]
        assert decile["mae"]["CausalQwen"] == pytest.approx(found["results"]["CausalQwen"]["mae"])
    assert len(found["worst"]) == 10
    assert abs(float(found["worst"][0]["predicted"]) - found["worst"][0]["truth"]) == pytest.approx(max(errors))
    assert found["results"]["CausalQwen"]["mae"] == pytest.approx(sum(errors) / 12, rel=1e-5)  # cells have seven digits
    of_seeds = found["seeds"]["mae"]  # Student's t of one degree of freedom is 12.7062 at 97.5 %
    assert of_seeds["values"][0] == found["results"]["CausalQwen"]["mae"]
    assert of_seeds["mean"] == pytest.approx(sum(of_seeds["values"]) / 2)
    spread = abs(of_seeds["values"][0] - of_seeds["values"][1]) / 2
    assert of_seeds["reach"] == pytest.approx(12.7062 * spread, rel=1e-5, abs=1e-12)  # 0 if no step improved a start
    config, other = load_config(out / "fit.yaml"), load_config(out / "fit-1.yaml")
    assert (other.train.seed, Path(other.run.dir)) == (config.train.seed + 1, out / "run-1")
    assert [stage.name for stage in config.stages] == ["lora"]
    page = html.unescape((out / "report.html").read_text(encoding="utf-8"))
    assert 0 < page.index(found["verdict"]) < page.index("The largest errors") < page.index("At a glance</h2>")
    assert "Words right" not in page[page.index("<main>") : page.index("All last metrics")]


def test_the_same_command_resumes_and_another_is_refused(fitted: tuple[Path, list[object]]) -> None:
    out, command = fitted
    before = (out / "predicted.csv").read_text(encoding="utf-8")
    again = cqwen_forked(*command, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["rows"] == 12, "nothing else is on stdout"
    assert (out / "predicted.csv").read_text(encoding="utf-8") == before
    other = cqwen_forked(*command, "--seed", "1")
    assert other.returncode == 2
    assert "--out: found" in other.stderr
    assert "one of the same command" in other.stderr
    table = Path(str(command[1]))
    text = table.read_text(encoding="utf-8")
    try:
        table.write_text(text.replace("Rome", "Roma"), encoding="utf-8")
        changed = cqwen_forked(*command)
    finally:
        table.write_text(text, encoding="utf-8")
    assert changed.returncode == 2
    assert f"a fit of {table.name} as it was before" in changed.stderr


def test_predict_uses_the_fits_template(fitted: tuple[Path, list[object]]) -> None:
    out, _ = fitted
    checkpoint = json.loads((out / "fit.json").read_text(encoding="utf-8"))["checkpoint"]
    assert out / (out / "best").read_text().strip() == Path(checkpoint)
    done = cqwen_forked("predict", out, out / "table" / "test.csv")
    assert done.returncode == 0, done.stderr
    with (out / "predicted.csv").open(encoding="utf-8") as file:
        before = list(csv.DictReader(file))
    for row, same in zip(csv.DictReader(done.stdout.splitlines()), before, strict=True):
        assert float(row["low_90"]) == pytest.approx(float(same["low_90"]), rel=1e-4)  # other rows share the batch


def test_a_raw_table_is_predicted_as_the_fits_rows(fitted: tuple[Path, list[object]], tmp_path: Path) -> None:
    out, _ = fitted
    with (out / "predicted.csv").open(encoding="utf-8") as file:
        before = list(csv.DictReader(file))
    lines = ["", "height; city ;age;more", *(f" {r['height']};{r['city']} ; {r['age']};x" for r in before)]
    (tmp_path / "more.csv.gz").write_bytes(gzip.compress("\r\n".join(lines).encode("utf-8-sig")))
    for row, same in zip(predict(out, tmp_path / "more.csv.gz", digits=7), before, strict=True):
        assert row["predicted"] == pytest.approx(float(same["predicted"]), rel=1e-4)
    (tmp_path / "short.csv").write_text("city,age\nRome,3\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"short\.csv: found no column height, allowed: the columns that the run"):
        predict(out, tmp_path / "short.csv")


def test_an_exported_fit_predicts_and_marks_rows_as_fit_does(fitted: tuple[Path, list[object]], tmp_path: Path) -> None:
    out, _ = fitted
    exported = export(export(out, tmp_path / "first"), tmp_path / "second")
    rows = [{"city": "Rome", "age": 30, "height": 1.8}, {"city": "Bern", "age": 5000, "height": None}]
    said: list[str] = []
    for own, other in zip(predict(out, rows, say=said.append), predict(exported, rows, say=said.append), strict=True):
        assert other["outside"] == own["outside"]
        assert other["low_90"] == pytest.approx(own["low_90"], rel=1e-4)
    assert own["outside"].startswith("age, city")
    assert said[:3] == said[3:], "how the rows differ from those learnt"
    assert said[0] == "column city: 1 of 2 cells are none of the 2 learnt (Bern)"
    assert "outside of 11 to 50" in said[1]


@pytest.mark.slow
def test_folds_judge_each_row_once(one_rank: Path, tmp_path: Path) -> None:
    table, out = write_table(tmp_path / "people.csv"), tmp_path / "out"
    command = ["fit", table, "--target", "score", "--base", one_rank / "base", "--out", out, "--minutes", "6"]
    done = cqwen_forked(*command, "--folds", "3")
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "fit.json").read_text(encoding="utf-8"))
    assert found["rows"] == 60
    with (out / "predicted.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    given = list(csv.DictReader(table.open(encoding="utf-8")))
    names = list(given[0])
    assert sorted([row[name] for name in names] for row in rows) == sorted([*row.values()] for row in given)
    tables, errors = [out / name for name in ("table", "table-1", "table-2")], []
    for fold, run in zip(tables, ("run", "run-1", "run-2"), strict=True):
        parts = {p.stem: {tuple(row.values()) for row in csv.DictReader(p.open())} for p in fold.glob("*.csv")}
        assert not parts["test"] & (parts["train"] | parts["valid"])
        assert load_config(out / run / "config.yaml").data.train == str(fold / "train.csv")
        own = [row for row in rows if tuple(row[name] for name in names) in parts["test"]]
        assert 17 <= len(own) <= 23
        errors.append([abs(float(row["predicted"]) - float(row["score"])) for row in own])
    assert found["folds"]["mae"]["values"] == pytest.approx([sum(of) / len(of) for of in errors], rel=1e-5)
    assert found["results"]["CausalQwen"]["mae"] == pytest.approx(sum(map(sum, errors)) / 60, rel=1e-5)
    assert "3 folds: MAE " in done.stdout
    assert found["results"]["ridge, numeric columns"]["mae"] > 0
    again = cqwen_forked(*command, "--folds", "3", "--seeds", "2")
    assert "--folds: found 3 with --seeds" in again.stderr


@pytest.mark.parametrize("wrong", [["--minutes", "0"], ["--base", "nowhere/none"]])
def test_a_wrong_option_is_one_line_and_leaves_nothing(tmp_path: Path, wrong: list[str]) -> None:
    table = write_table(tmp_path / "people.csv")
    done = cqwen_forked("fit", table, "--target", "score", "--out", tmp_path / "out", *wrong)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert f"{wrong[0]}: found" in done.stderr
    assert list(tmp_path.iterdir()) == [table]


def test_rows_leave_room_for_the_number_in_the_context(one_rank: Path, tmp_path: Path) -> None:
    rows = "".join(f"{'a' * (i % 60)},{i}\n" for i in range(120))  # prompts of all lengths around the context
    rows += "6<<3*2=6>> eggs,120\n"
    (tmp_path / "t.csv").write_text(f"note,score\n{rows}", encoding="utf-8")
    (tmp_path / "split.json").write_text(json.dumps([*range(0, 121, 2)]))
    base, said = str(one_rank / "base"), []
    asked = FitRequest(str(tmp_path / "t.csv"), "score", base, [], None, f"{tmp_path}/split.json", minutes=1.0)
    ((_, parts, prompts, *_),) = prepare(asked, tmp_path / "out", said.append)
    tokenizer = NumericalAwareTokenizer.from_pretrained(base)
    assert max(len(tokenizer.encode(prompts[row])[0]) for row in parts.test) == 63
    assert "note: 6 eggs\nscore: " in prompts, "as training reads the row"
    assert any("rows of 64 tokens or more, all that the base reads, are not judged" in line for line in said)
