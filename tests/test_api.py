"""The Python API: the same runs, predictions and errors as the command line's, in this process and on two ranks."""

import ast
import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
import yaml
from support.ranks import run_ranks
from support.runs import as_rank, command_environment, cqwen_forked, losses, metrics, write_config
from transformers import PreTrainedModel

import cqwen_dist
from cqwen_dist import (
    Callback,
    CallbackError,
    Moment,
    Stage,
    TrainResult,
    UserError,
    api,
    evaluate,
    load,
    predict,
    train,
)
from cqwen_dist.config import DataConfig, LossConfig, TrainConfig, given_config, load_config
from cqwen_dist.run.status import read_status

TEMPLATE = "{item} costs {amount} and bread costs"
WITHOUT_TORCH = """
import sys, cqwen_dist
assert not {"torch", "transformers", "numpy", "pydantic"} & set(sys.modules), "imported by `import cqwen_dist`"
assert set(cqwen_dist.__all__) <= set(dir(cqwen_dist))
import cqwen_dist.training.callbacks  # binds the folder's name in the package
from cqwen_dist import train
try:
    train({"model": {}, "data": {"train": "x"}})
except cqwen_dist.UserError as error:
    print(error)
"""


class Recorder(Callback):
    """Notes what it is told; stops the run at an evaluation."""

    def __init__(self, stop_at: int = 99) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.stop_at = stop_at

    def on_stage_start(self, at: Moment) -> None:
        self.seen.append(("start", at.step, at.stage))

    def on_step(self, at: Moment, metrics: Any) -> None:
        self.seen.append(("step", at.step, metrics["train/total_loss"]))

    def on_evaluation(self, at: Moment, metrics: Any) -> None:
        self.seen.append(("evaluation", at.step, metrics.pop("eval/accuracy")))  # they are the callback's own
        if at.step == self.stop_at:
            at.stop("far enough")

    def on_checkpoint(self, at: Moment, checkpoint: Path) -> None:
        assert (checkpoint / "manifest.json").is_file(), "it is whole"
        self.seen.append(("checkpoint", at.step, checkpoint.name))

    def on_stage_end(self, at: Moment) -> None:
        self.seen.append(("end", at.step, at.stage))

    def order(self) -> list[tuple[str, int]]:
        """Without checkpoints: they are written in the background, so the steps that see them vary."""
        return [(kind, step) for kind, step, _ in self.seen if kind != "checkpoint"]


class Broken(Callback):
    def on_step(self, at: Moment, metrics: Any) -> None:
        if at.step == 2:
            raise ValueError("no more room")


def of(one_rank: Path, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The config of conftest's run, as a program might hold it, and its records."""
    tree = yaml.safe_load((one_rank.parent / "config.yaml").read_text())
    rows = [json.loads(line) for line in Path(tree["data"].pop("train")).read_text().splitlines()]
    tree["stages"] = [Stage(**stage) for stage in tree["stages"]]
    tree["train"] = TrainConfig(**tree["train"])
    tree["run"] = {"dir": folder / "run"}
    return tree, rows


@pytest.fixture(scope="module")
def ran(one_rank: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainResult, Any, Any]:
    """That run by the API: in two calls, stopped by a callback in between; its config and its records."""
    tree, rows = of(one_rank, tmp_path_factory.mktemp("api"))
    first = Recorder(stop_at=3)
    paused = train(tree, (row for row in rows), callbacks=[first])
    assert (paused.status, paused.step, paused.reason) == ("paused", 3, "far enough")
    assert first.order() == [
        *[("evaluation", 0), ("start", 0), ("step", 1), ("step", 2), ("step", 3), ("evaluation", 3), ("end", 3)]
    ]
    written = [name for kind, _, name in first.seen if kind == "checkpoint"]
    assert written == [f"step-{step:08d}" for step in (1, 2, 3)], "each once it is whole"
    second = Recorder()
    done = train(tree, [row["text"] for row in rows], callbacks=[second])
    assert second.order()[:2] == [("start", 3), ("step", 4)]
    told = [value for kind, _, value in first.seen + second.seen if kind == "step"]
    assert told == losses(done.folder)
    return done, tree, rows


def weights(run: Path) -> dict[str, bytes]:
    """Every tensor file of the last checkpoint."""
    folder = run / (run / "latest").read_text().strip()
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.safetensors")}


def test_train_equals_cqwen_train_to_the_bit(one_rank: Path, ran: Any) -> None:
    done, tree, rows = ran
    assert (done.status, done.step, done.rank, done.reason) == ("done", 6, 0, None)
    assert done.checkpoint == done.folder / "checkpoints" / "step-00000006"
    assert weights(done.folder) == weights(one_rank)
    assert done.metrics["eval/accuracy"] == metrics(one_rank)[-1]["eval/accuracy"]
    assert {"report.html", "config.yaml", "metrics.jsonl"} <= {path.name for path in done.folder.iterdir()}
    again = cqwen_forked("train", done.folder / "config.yaml")
    assert (again.returncode, "already done" in again.stdout) == (0, True), again.stderr
    assert train(tree, pandas.DataFrame(rows)) == done
    with pytest.raises(UserError, match=r"^data\.train: found other rows than the run began with"):
        train(tree, rows[:-1])
    with pytest.raises(UserError, match=r"stages\.0\.lr: found 0\.5, allowed: 0\.01, as stage heads is over"):
        train(tree, rows, overrides={"stages.0.lr": 0.5})


def test_a_checkpoint_saved_at_a_stop_has_the_metrics_of_its_step(one_rank: Path, tmp_path: Path) -> None:
    tree, rows = of(one_rank, tmp_path)
    every = {"train.checkpoint_every": 100, "train.eval_every": 2}
    stopped = train(tree, rows, callbacks=[Recorder(stop_at=2)], overrides=every)
    assert stopped.checkpoint is not None
    manifest = json.loads((stopped.checkpoint / "manifest.json").read_text())
    assert (manifest["step"], manifest["figures"]["eval/accuracy"]) == (2, stopped.metrics["eval/accuracy"])


def test_predict_equals_cqwen_predict(ran: Any, tmp_path: Path) -> None:
    run = ran[0]
    table = [{"item": "tea", "amount": 3.5}, {"item": "milk", "amount": 12.0}, {"item": "rice", "amount": -4.25}]
    path = tmp_path / "table.csv"
    path.write_text("item,amount\ntea,3.5\nmilk,12\nrice,-4.25\n")
    command = cqwen_forked("predict", run.folder, path, "--template", TEMPLATE, "--digits", "5")
    assert command.returncode == 0, command.stderr
    expected = list(csv.DictReader(io.StringIO(command.stdout)))
    pair = load(run)
    for model, rows in ((run.folder, path), (run, table), (pair, pandas.DataFrame(table))):
        found = predict(model, rows, TEMPLATE, digits=5)
        told = [{name: "" if value is None else str(value) for name, value in row.items()} for row in found]
        assert [{**row, "amount": ""} for row in told] == [{**row, "amount": ""} for row in expected]
    assert found[1]["amount"] == 12.0, "the row's own cell"
    assert predict(pair, table, TEMPLATE, options=[" and", " for"])[0]["chosen"] in (" and", " for")
    lines = tmp_path / "table.jsonl"
    last = {"item": "rice"}  # its amount is what an empty cell is filled with
    lines.write_text("".join(json.dumps(record) + "\n" for record in (*table[:2], last)))
    pandas.DataFrame(table).to_parquet(tmp_path / "table.parquet")
    read = [predict(pair, file, TEMPLATE, empty="-4.25") for file in (tmp_path / "table.parquet", str(lines))]
    assert [row["predicted"] for row in read[0]] == [row["predicted"] for row in read[1]]
    assert read[1][2]["amount"] is None
    assert [row["low_90"] for row in read[0]] == [row["low_90"] for row in predict(pair, table, TEMPLATE)]
    assert predict(pair, [], TEMPLATE) == predict(run, pandas.DataFrame(table)[:0], TEMPLATE) == []
    odd_ones = ((["a"], "row 1: rows: found 'a', allowed: a dict"), ([*table, "x"], "row 4: rows"))
    for odd, match in (*odd_ones, ("no.csv", "FILE"), (tmp_path / "no.parquet", "FILE: found no file")):
        with pytest.raises(UserError, match=match):
            predict(pair, odd, TEMPLATE)
    with pytest.raises(UserError, match="options: found ' and', allowed: a list"):  # no list of its letters
        predict(pair, table, TEMPLATE, options=" and")


def test_evaluate_equals_the_runs_evaluation_and_load_gives_a_ready_model(ran: Any) -> None:
    run, _, rows = ran
    own = evaluate(run)
    assert own["eval/cls_loss_mean"] == pytest.approx(run.metrics["eval/cls_loss_mean"], rel=1e-5)
    other = evaluate(run.folder, (row["text"] for row in rows))
    assert (
        other["eval/numbers"] == evaluate(run, datasets.Dataset.from_list(rows))["eval/numbers"] > own["eval/numbers"]
    )
    model, tokenizer = load(run)
    assert isinstance(model, PreTrainedModel)
    ids, numbers = model.generate(**tokenizer("tea costs 3.5 and", return_tensors="pt"), return_numbers=True)
    assert isinstance(tokenizer.decode(ids[0], numbers.values[0]), str)
    with pytest.raises(UserError, match="label-set"):
        evaluate(run, label_set=2.0)
    with pytest.raises(UserError, match="model: found a loaded model, allowed: a TrainResult, or a folder"):
        evaluate((model, tokenizer))  # type: ignore[arg-type]


def on_two(tree: dict[str, Any], rows: list[dict[str, Any]]) -> list[Any]:
    """A callback fails; the same call stops; then it ends. What each rank saw."""
    rank = as_rank().rank
    given = datasets.Dataset.from_list(rows) if rank == 0 else iter(())  # of rank 1 nothing is read
    try:
        train(tree, given, callbacks=[Broken()])
    except CallbackError as error:
        failed = str(error), type(error.__cause__).__name__, read_status(tree["run"]["dir"])["status"]
    stops, ends = Recorder(stop_at=3), Recorder()
    paused = train(tree, given, callbacks=[stops])
    done = train(tree, given, callbacks=[ends])
    return [failed, paused.status, paused.step, done.status, done.rank, len(stops.seen) > 0, ends.order()]


def test_a_failing_callback_ends_both_ranks_and_a_stopping_one_stops_both(one_rank: Path, tmp_path: Path) -> None:
    tree, rows = of(one_rank, tmp_path)
    tree["train"] = tree["train"].model_copy(update={"micro_batch_size": 6})
    said = "the callback Broken.on_step raised ValueError: no more room"
    first, second = run_ranks(on_two, 2, tree, rows)
    assert first[0] == (said, "ValueError", "fatal")
    assert second[0][:2] == (said, "NoneType")
    assert first[1:6] == ["paused", 3, "done", 0, True]
    assert second[1:] == ["paused", 3, "done", 1, False, []], "callbacks are called on rank 0 alone"
    assert ("step", 6) in first[6]
    assert losses(tmp_path / "run") == pytest.approx(losses(one_rank), rel=1e-5)


def test_the_api_is_imported_lazily_and_seen_by_type_checkers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, env=command_environment()
    )
    tree = ast.parse(Path(cqwen_dist.__file__).read_text())
    typed = [{a.name for a in n.names} for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level == 0]
    assert set(cqwen_dist.__all__) == {*api.__all__, "CausalQwenModel"}
    assert {"CausalQwenModel"} in typed
    assert set(api.__all__) in typed, "what type checkers see"
    assert Path(cqwen_dist.__file__).with_name("py.typed").is_file()
    assert done.stdout.startswith("model.name_or_path/architecture: found neither"), done.stderr


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"stages": [{"name": "a", "train": ["feet"], "steps": 1}]}, r"^stages\.0\.train\.0: found 'feet', allowed: "),
        ({"trian": {}}, r"^trian: unknown key; did you mean train\?"),
        ({"loss": LossConfig}, "^loss: found <class"),
    ],
)
def test_a_config_out_of_python_is_refused_in_one_line(one_rank: Path, change: dict[str, Any], match: str) -> None:
    tree, _ = of(one_rank, Path("x"))
    with pytest.raises(UserError, match=match):
        train({**tree, **change}, ["a text"])


def test_refuses_what_is_not_a_config_data_or_a_callback(one_rank: Path, tmp_path: Path) -> None:
    tree, rows = of(one_rank, tmp_path)
    for given, callbacks, match in (
        (None, [], r"^data\.train: found no value"),
        (rows, Recorder(), r"^callbacks: found <.*Recorder object.*>, allowed: a list"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}), [], r"data\.train: found a DatasetDict"),
        ([{"text": "a"}, 3], [], r"^row 2: data\.train: found 3, allowed: a text, or"),
    ):
        with pytest.raises(UserError, match=match):
            train(tree, given, callbacks=callbacks)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^config: found 3, allowed: a path, a dict"):
        train(3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^override train\.seed: train\.seed: found 'x'"):
        train(tree, rows, overrides={"train.seed": "x"})


def test_a_config_may_be_a_file_a_dict_or_objects(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    known = load_config(path, ["train.seed=3", "stages.1.steps=4"])
    tree = yaml.safe_load(path.read_text())
    tree["data"] = DataConfig(**tree["data"])
    changes = {"train.seed": 3, "stages.1.steps": 4}
    assert (
        given_config(path, changes) == given_config(tree, changes) == given_config(load_config(path), changes) == known
    )
    scalars = {"train.seed": np.int64(3), "stages.0.lr": torch.tensor(0.5), "stages.0.steps": torch.tensor([7])[0]}
    swept = given_config(known, scalars)
    assert (swept.train.seed, swept.stages[0].lr, swept.stages[0].steps) == (3, 0.5, 7)
    assert given_config(known, {"stages": [Stage(name="a", train=["heads"], steps=2)]}).last_stage == 0
