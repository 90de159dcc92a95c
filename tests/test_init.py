"""`cqwen init`: somebody's data in, a config that trains on it out; what lies in the wheel."""

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pyarrow
import pyarrow.parquet
import pytest
from support import runs
from support.runs import metrics, train_run

from cqwen_dist.config import load_config
from cqwen_dist.config.trainable import dense_rate
from cqwen_dist.data.recipes import recognise
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_texts

ROOT = Path(__file__).parents[1]
Command = Callable[..., CompletedProcess[str]]
CHAT = [{"role": "user", "content": "2 and 3?"}, {"role": "assistant", "content": "5"}]
SHAREGPT = [{"from": "human", "value": "2 and 3?"}, {"from": "gpt", "value": "5"}]
RECORDS = {  # of a JSON lines file: what is recognised, the first text
    "ShareGPT": ({"conversations": SHAREGPT, "id": "x"}, {"messages_field": "conversations"}, None),
    "with input": ({"instruction": "Add", "input": "2 and 3", "output": "5"}, None, "Add\n2 and 3\n5"),
    "questions": ({"question": "2 and 3?", "answer": "5", "id": 7}, None, "2 and 3?\n5"),
    "texts": ({"text": "2 and 3 make 5", "source": "x"}, {}, "2 and 3 make 5"),
    "a table": ({"city": "Rome", "age": 31, "score": 4.5}, None, "city: Rome\nage: 31\nscore: 4.5\n"),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_init_recognises_kind_of_records_and_writes_config_for_them(cqwen: Command, tmp_path: Path, kind: str) -> None:
    record, keys, text = RECORDS[kind]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for _ in range(3)), encoding="utf-8")
    if keys is not None:
        assert recognise(str(data)).keys == keys
    out = tmp_path / "run.yaml"
    done = cqwen("init", "--data", data, "--out", out)
    assert done.returncode == 0, done.stderr
    config = load_config(out)
    if text is not None:
        assert next(read_texts(str(data), config.data, ReadReport())).text == text
        assert text.splitlines()[0] in done.stdout, "it is shown"
    again = cqwen("init", "--data", data, "--out", out)
    assert again.returncode == 2
    assert "--out: found" in again.stderr


def test_a_table_with_empty_cells_trains_as_init_wrote(cqwen: Command, one_rank: Path, tmp_path: Path) -> None:
    cities, scores = ["Rome", None, "Oslo", "Bern"] * 5, [4.5, 3.25, float("nan"), 2.0] * 5
    table = pyarrow.table({"city": cities, "score": scores})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    out = tmp_path / "run.yaml"
    done = cqwen("init", "--data", tmp_path / "t.parquet", "--base", one_rank / "base", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "    city: Rome\n    score: 4.5\n" in done.stdout
    assert f"cqwen fit {tmp_path / 't.parquet'} --target score" in done.stdout
    config = load_config(out)
    assert (config.data.target_field, config.data.empty_cell, config.data.on_bad_line) == ("score", "unknown", "skip")
    texts = [text.text for text in read_texts(config.data.train, config.data, ReadReport())]
    assert "city: unknown\nscore: 3.25\n" in texts
    assert len(texts) == 15, "a row without the number to be learnt teaches nothing"
    train_run(out, f"run.dir={tmp_path / 'run'}", "train.precision=fp32", "stages.0.epochs=1", "stages.1.epochs=1")
    assert {record["stage"] for record in metrics(tmp_path / "run")} == {"heads", "lora"}


@pytest.mark.slow
def test_defaults_for_little_data_learn_and_reach_their_rate(cqwen: Command, one_rank: Path, tmp_path: Path) -> None:
    data, out, run = tmp_path / "chats.jsonl", tmp_path / "run.yaml", tmp_path / "run"
    turns = ([{**CHAT[0], "content": f"{i} and {i % 7}?"}, {**CHAT[1], "content": f"{i + i % 7}"}] for i in range(150))
    data.write_text("".join(json.dumps({"messages": own}) + "\n" for own in turns), encoding="utf-8")
    done = cqwen("init", "--data", data, "--base", one_rank / "base", "--out", out)
    assert done.returncode == 0, done.stderr
    said = "150 texts, about 2. tokens in the median: 102 steps of 8 in each stage"
    assert re.search(said, done.stdout), done.stdout
    checked = cqwen("config", "validate", out)
    assert checked.stderr == f"{out}: valid\n", "nothing is noted"
    train_run(out, f"run.dir={run}", "train.precision=fp32", "model.lora.r=2")
    hidden = json.loads((one_rank / "base" / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    for stage in load_config(out).stages:
        assert f"{stage.lr:.1e}" == f"{dense_rate(hidden):.1e}"
        records = [record for record in metrics(run) if record["stage"] == stage.name]
        assert max(record["train/lr"] for record in records) == pytest.approx(stage.lr)
        assert len(records) > 5 * stage.warmup_steps
    steps = metrics(run)
    tenth = len(steps) // 10
    for loss in ("train/cls_loss_mean", "train/total_loss"):
        assert sum(step[loss] for step in steps[-tenth:]) < sum(step[loss] for step in steps[:tenth])


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ('{"a": [1]}\n', (), "--data: found 'a', allowed: chats, instruction and output"),
        ('{"a": "x", "b": 1}\n', ("--target", "a"), "--target: found 'x', allowed: numbers in the column a"),
        ('{"text": ""}\n{"text": "x 1"}\n', (), "data.jsonl:1: empty text: found '', allowed: a text that is not"),
        ('{"text": "x 1"}\n', ("--base", "."), "--base: found '.', allowed: a folder with a config.json"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(cqwen, tmp_path, text, options, said) -> None:
    (tmp_path / "data.jsonl").write_text(text, encoding="utf-8")
    done = cqwen("init", "--data", tmp_path / "data.jsonl", "--out", tmp_path / "run.yaml", *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl"]


SHORT = ["model.pretrain.steps=40", "data.limit=64", "stages.0.steps=3", "stages.1.steps=3"]


@pytest.mark.slow
def test_the_quickstart_of_a_wheel_runs_anywhere(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, ROOT]
    subprocess.run(build, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    assert {f"cqwen_dist/configs/{path.name}" for path in (ROOT / "configs").iterdir()} <= set(archive.namelist())
    shipped = [path for ending in ("j2", "yaml") for path in (ROOT / "cqwen_dist").rglob(f"*.{ending}")]
    assert {str(path.relative_to(ROOT)) for path in shipped} <= set(archive.namelist()), "templates and tables"
    archive.extractall(tmp_path / "site")
    empty = tmp_path / "empty"
    empty.mkdir()
    done = runs.cqwen("quickstart", "--json", *SHORT, cwd=empty, PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ridge_mdae"] == pytest.approx(40.2, abs=0.1)
    assert (empty / "runs" / "quickstart" / "export" / "config.json").is_file()
