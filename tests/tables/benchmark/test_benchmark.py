"""`cqwen bench numbers`: which sets it knows, its page, and a whole run."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.runs import cqwen_forked

from cqwen_dist.config import UserError
from cqwen_dist.tables.benchmark.benchmark_page import page
from cqwen_dist.tables.benchmark.competitors import ARMS
from cqwen_dist.tables.benchmark.published import OURS, Benchmark


def test_unknown_sets_are_refused_and_missing_files_are_named(tmp_path: Path) -> None:
    said: list[str] = []
    benchmark = Benchmark(tmp_path, tmp_path / "out", "base", 1.0, True, 0, None, said.append)
    with pytest.raises(UserError, match="--only: found 'boston', allowed: out of concrete, energy"):
        benchmark.run(["boston"], 1)
    assert benchmark.run(["energy", "gsm8k"], 1)["sets"] == {}
    assert [line.partition(":")[0] for line in said] == ["energy", "gsm8k"]


def test_the_page_ranks_models_by_error() -> None:
    def scores(mae: float, crps: float, **more: float) -> dict[str, float]:
        return {"mae": mae, "rmse": mae, "r2": 0.5, "crps": crps, **more}

    splits = [
        {
            OURS: scores(mae, mae / 2, coverage_90=0.9, width_90=2.0),
            "always the median": scores(9, 9),
            "ridge, numeric columns": scores(3 + i, 3 + i),
            "quantiles, on z": scores(4, 1.25 + i),
            "digits, median of 64, on z": scores(5, 3),
        }
        for i, mae in enumerate((1.0, 2.0, 6.0))
    ]
    document = {"date": "today", "machine": "this", "base": "b", "minutes": 1, "test_rows": None, "laws": {}}
    text = page({**document, "sets": {"energy": splits}})
    assert "| energy | 3 | 2 | 4 |  | 4 | 1 | 2.25 | 90% |" in text.splitlines(), "medians; of each kind the least"
    assert text.index("| energy | 3") < text.index("### energy: 3 splits, RMSE published 0.539")
    assert "| always the median | 9 (9 to 9) |" in text


def test_a_set_is_measured_once_and_its_page_lists_every_model(one_rank: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 2))
    (tmp_path / "tables").mkdir()
    rows = pa.table({"body": x[:, 0], "age": x[:, 1], "price": x.sum(1)})
    pq.write_table(rows, tmp_path / "tables" / "wine_pl.parquet")
    command = ["bench", "numbers", "--only", "wine_pl", "--data", tmp_path, "--base", one_rank / "base"]
    command += ["--splits", 1, "--minutes", 2, "--out", tmp_path / "out", "--table", tmp_path / "page.md"]
    first = cqwen_forked(*command)
    assert first.returncode == 0, first.stderr
    document = json.loads((tmp_path / "out" / "numbers.json").read_text())
    (results,) = document["sets"]["wine_pl"]
    text = (tmp_path / "page.md").read_text()
    assert text == page(document)
    assert "### wine_pl: 1 splits" in text
    for name in (OURS, "ridge, numeric columns", "gradient boosting", "squared error, on z", "quantiles, on z"):
        assert f"| {name} | {results[name]['mae']:.4g} |" in text
    assert results["ridge, numeric columns"]["mae"] < 0.05  # the target is their sum
    assert results[OURS]["crps"] < results["always the median"]["crps"]
    assert all("log_likelihood" in results[name] for name in (OURS, "squared error, on z"))
    assert "log_likelihood" not in results["quantiles, on z"], "it has no density"
    again = cqwen_forked(*command, "--lora-epochs", 1)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[0] == "wine_pl, split 0: heads with adapters", "nothing else is done again"
    (more,) = json.loads((tmp_path / "out" / "numbers.json").read_text())["sets"]["wine_pl"]
    arms = [f"{name}, LoRA, epochs: 1" for name in (*ARMS, "text, greedy", "text, median of 64")]
    assert list(more) == [*results, *arms]
    assert all(np.isfinite(list(more[name].values())).all() for name in arms)
    assert {name: more[name] for name in results} == results
    assert "split 0" not in cqwen_forked(*command, "--lora-epochs", 1).stdout
    # as if it had been killed before the last arm of each kind
    file, lost = tmp_path / "out" / "wine_pl" / "split-0" / "numbers.json", (arms[2], arms[4])
    kept = json.loads(file.read_text())
    done = {name: of for name, of in kept["results"].items() if name not in lost}
    marked = done | {arms[0]: done[arms[0]] | {"mae": 7.0}}
    file.write_text(json.dumps({**kept, "results": marked}))
    assert cqwen_forked(*command, "--lora-epochs", 1).returncode == 0
    found = json.loads(file.read_text())["results"]
    assert {name: found[name] for name in marked} == marked, "what is known is not learnt again"
    for name in lost:
        same = {key: value for key, value in kept["results"][name].items() if key != "seconds"}
        assert {key: found[name][key] for key in same} == pytest.approx(same)
