"""The decisions of a number head in the words' loss of a run."""

import json
from pathlib import Path

import pytest
from support.runs import metrics, train_run, write_config


def test_the_words_loss_of_an_evaluation_has_the_heads_decisions_as_training(tmp_path: Path) -> None:
    """Which of the earlier numbers it is: the first step and the evaluation before it agree."""
    rows = [f"{('tea', 'milk', '2 salts')[i % 3]},{20 + i * 7 % 10}.25,{20 + i * 7 % 10}.25" for i in range(12)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["item,price,again", *rows]) + "\n")
    data = {"data__train": str(table), "data__eval": str(table), "data__eval_fraction": 0.0}
    data |= {"data__text_template": "{item} costs {price}, again {again}", "model__candidates": "arithmetic"}
    one_step = {"stages": [{"name": "heads", "train": ["heads"], "steps": 1}], "train__global_batch_size": 12}
    train_run(write_config(tmp_path, **data, **one_step))
    start = json.loads((tmp_path / "run" / "start.json").read_text())["eval"]
    assert start["eval/cls_loss_mean"] == pytest.approx(metrics(tmp_path / "run")[0]["train/cls_loss_mean"], rel=1e-4)
