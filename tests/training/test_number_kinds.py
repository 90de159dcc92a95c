"""Numbers of several types and numbers with several values (S4 4.7), from a table to predictions, over two ranks."""

import csv
import json
import random
from pathlib import Path

import pytest
import torch
from support.exported import tiny_pair
from support.numerics import assert_close
from support.runs import losses, metrics, train_run, write_config

from cqwen_dist.api import predict
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import UserError, load_config
from cqwen_dist.data.collate import collate
from cqwen_dist.data.load import load_datasets
from cqwen_dist.generate.continuation import continue_text
from cqwen_dist.prediction.table import NUMBER_COLUMNS, number_columns
from cqwen_dist.tools.export.export import export

KINDS = {
    "types": {
        "data__text_template": "{item} costs {price} and has {age} years in box {box}",
        "data__number_types": ["price", "age"],
        "stages__0__steps": 80,  # after 40, rounding decides whether half of the types are right
    },
    "values": {
        "data__text_template": "{item} costs {price} in box {box}",
        "data__target_field": "price",
        "data__more_values": ["high"],
        "loss__value_weights": [1.0, 0.5],
    },
}


def write_table(path: Path, rows: int = 60) -> Path:
    draw = random.Random(0)
    lines = ["item,price,age,box,high"]
    for _ in range(rows):
        price = draw.uniform(20, 30)
        item = draw.choice(["tea", "milk", "2 salts"])
        lines.append(f"{item},{price:.2f},{draw.uniform(-9, -1):.1f},{draw.randint(1, 9)},{price + 40:.2f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def configured(folder: Path, kind: str, **more: object) -> Path:
    """Two ranks that share the vocabulary, ZeRO 2, a cache of features in the first stage."""
    options: dict[str, object] = {
        "data__train": str(write_table(folder / "table.csv")),
        "data__pack": True,
        "parallel__vocab_group_size": 2,
        "parallel__zero_stage": 2,
        "stages__0__steps": 40,
        "stages__0__lr": 3e-2,
        "stages__1__steps": 2,
        "train__checkpoint_every": 100,
        "train__eval_every": 100,
    }
    return write_config(folder, **{**options, **KINDS[kind], **more})


@pytest.mark.parametrize("read", [KINDS["types"], {**KINDS["values"], "model__copies": 2}])
def test_the_words_loss_of_an_evaluation_has_the_heads_decisions_as_training(
    tmp_path: Path, read: dict[str, object]
) -> None:
    """The type of a number, or which of the earlier ones it is: the first step and the evaluation before it agree."""
    table = str(write_table(tmp_path / "table.csv", 12))
    one_step = {"stages": [{"name": "heads", "train": ["heads"], "steps": 1}], "train__global_batch_size": 12}
    given = {key: value for key, value in read.items() if key != "stages__0__steps"}
    data = {"data__train": table, "data__eval": table, "data__eval_fraction": 0.0}
    train_run(write_config(tmp_path, **data, **one_step, **given))
    start = json.loads((tmp_path / "run" / "start.json").read_text())["eval"]
    assert start["eval/cls_loss_mean"] == pytest.approx(metrics(tmp_path / "run")[0]["train/cls_loss_mean"], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_typed_numbers_train_and_predict_from_a_table(tmp_path: Path, kind: str) -> None:
    config, run = configured(tmp_path, kind), tmp_path / "run"
    if kind == "types":
        train_run(config, "run.stop_after=heads", world=2)  # from whose checkpoint the next goes on
    train_run(config, world=2)
    found = losses(run)
    assert len(found) == (82 if kind == "types" else 42)
    assert sum(found[-5:]) < 0.7 * sum(found[:5])
    evaluated = [record for record in metrics(run) if "eval/accuracy" in record][-1]
    if kind == "types":
        assert evaluated["eval/type_accuracy"] > 0.5  # of three, each as frequent
    else:
        assert evaluated["eval/mdae_high"] < 20.0  # a head that knew the first value alone would be off by 40

    model, tokenizer = load_trained(run)
    assert model.model.action.reg_weight.shape[0] == (6 if kind == "types" else 2)
    export(run, tmp_path / "out", True)
    exported, _ = load_trained(tmp_path / "out")
    assert torch.equal(exported.model.action.reg_weight, model.model.action.reg_weight)

    with torch.no_grad():
        exported.model.action.threshold[tokenizer.num_token_id] = -1e4  # a number comes at once
    (written,) = continue_text(exported, tokenizer, ["tea costs"], max_new_tokens=1)
    (number,) = written.to_dict()["numbers"]
    ids, values = tokenizer.encode("tea costs")
    with torch.no_grad():
        action = model.model.action
        u = model.model.infer(torch.tensor([ids]), torch.tensor([values], dtype=torch.float64))
        u_prime = action.add_noise(u)
        by_hand = model.model.target.inverse(action.number_head.values(u_prime).loc[0, -1].double())
    row = predict((exported, tokenizer), tmp_path / "table.csv", "{item} costs {box} or", within=1)[0]
    assert set(row) == {"item", "price", "age", "box", "high", *number_columns(model)}
    if kind == "types":
        likely = int(action.number_head.type_scores(u_prime).sf(0.0)[0, -1].argmax())
        assert number["type"] == ["other", "price", "age"][likely]
        assert row["type"] in ("other", "price", "age")
        assert_close(torch.tensor(number["value"]), by_hand[likely].float(), 1e-4)
        assert set(number_columns(model)) == {*NUMBER_COLUMNS, "type"}
    else:
        assert_close(torch.tensor(number["value"]), by_hand[0].float(), 1e-4)
        assert_close(torch.tensor(number["more"]["high"]["value"]), by_hand[1].float(), 1e-4)
        assert row["low_90_high"] < row["predicted_high"] < row["high_90_high"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", [False, True])
def test_number_types_of_a_table_are_learnt(tmp_path: Path, kind: str, cache: bool) -> None:
    """The items hold numbers too ("2 salts"), packing moves everything, and a prepared folder gives the same."""
    more = {"data__cache_dir": str(tmp_path / "cache"), "data__workers": 1} if cache else {}
    config = load_config(configured(tmp_path, kind, data__eval_fraction=0.0, **more))
    model, tokenizer = tiny_pair(**config.model_shape(), target={"name": "none"})
    dataset = load_datasets(config.data, tokenizer).train
    ids = {"pad_token_id": 0, "num_token_id": tokenizer.num_token_id}
    batch = collate([dataset[i] for i in range(len(dataset))], **ids)
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    keep = batch.learnt
    labels = model.model.action.number_head.labels(batch, keep, config.loss.value_weights)
    is_number, values = labels.is_number, labels.values.double().round(decimals=2)  # as the table has them
    if kind == "types":
        types = labels.types
        pairs = sorted(zip(values[is_number].tolist(), types[is_number].tolist(), strict=True))
        own = [[(float(r["price"]), 1), (float(r["age"]), 2), (float(r["box"]), 0)] for r in rows]
        assert pairs == sorted(pair for row in own for pair in row)  # a text's first number is none to learn
        assert (types[~is_number] == -1).all()
    else:
        pairs = sorted(map(tuple, values[is_number].tolist()))
        assert pairs == sorted((float(r["price"]), float(r["high"])) for r in rows)
        assert set(map(tuple, labels.weights[is_number].tolist())) == {(1.0, 0.5)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data__number_types": ["no"]}, "number_types.0: found 'no'"),
        ({"data__number_types": ["price"], "data__more_values": ["high"]}, "more_values"),
        ({"loss__value_weights": [1.0, 1.0, 1.0]}, "loss.value_weights: found .*2 weights"),
    ],
)
def test_mismatched_number_types_are_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(configured(tmp_path, "values", **changes))
