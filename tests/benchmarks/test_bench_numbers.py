"""`benchmarks numbers`: a whole run."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.runs import cqwen_forked

from benchmarks.numbers.competitors import ARMS
from benchmarks.numbers.published import OURS


@pytest.mark.slow
def test_a_set_is_measured_once_with_every_model(one_rank: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 2))
    (tmp_path / "tables").mkdir()
    rows = pa.table({"body": x[:, 0], "age": x[:, 1], "price": x.sum(1)})
    pq.write_table(rows, tmp_path / "tables" / "wine_pl.parquet")
    command = ["numbers", "--only", "wine_pl", "--data", tmp_path, "--base", one_rank / "base"]
    command += ["--splits", 1, "--minutes", 2, "--out", tmp_path / "out", "--table", tmp_path / "page.md"]
    first = cqwen_forked(*command, program="benchmarks")
    assert first.returncode == 0, first.stderr
    document = json.loads((tmp_path / "out" / "numbers.json").read_text())
    (results,) = document["sets"]["wine_pl"]
    text = (tmp_path / "page.md").read_text()
    for name in (OURS, "ridge, numeric columns", "gradient boosting", "squared error, on z", "quantiles, on z"):
        assert f"| {name} | {results[name]['mae']:.4g} |" in text
    assert results["ridge, numeric columns"]["mae"] < 0.05  # the target is their sum
    assert results[OURS]["crps"] < results["always the median"]["crps"]
    assert all("log_likelihood" in results[name] for name in (OURS, "squared error, on z"))
    assert "log_likelihood" not in results["quantiles, on z"], "it has no density"
    again = cqwen_forked(*command, "--lora-epochs", 1, program="benchmarks")
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[0] == "wine_pl, split 0: heads with adapters", "nothing else is done again"
    (more,) = json.loads((tmp_path / "out" / "numbers.json").read_text())["sets"]["wine_pl"]
    arms = [f"{name}, LoRA, epochs: 1" for name in (*ARMS, "text, greedy", "text, median of 64")]
    assert list(more) == [*results, *arms]
    assert all(np.isfinite(list(more[name].values())).all() for name in arms)
    assert {name: more[name] for name in results} == results
    assert "split 0" not in cqwen_forked(*command, "--lora-epochs", 1, program="benchmarks").stdout
    # as if it had been killed before the last arm of each kind
    file, lost = tmp_path / "out" / "wine_pl" / "split-0" / "numbers.json", (arms[2], arms[4])
    kept = json.loads(file.read_text())
    done = {name: of for name, of in kept["results"].items() if name not in lost}
    marked = done | {arms[0]: done[arms[0]] | {"mae": 7.0}}
    file.write_text(json.dumps({**kept, "results": marked}))
    assert cqwen_forked(*command, "--lora-epochs", 1, program="benchmarks").returncode == 0
    found = json.loads(file.read_text())["results"]
    assert {name: found[name] for name in marked} == marked, "what is known is not learnt again"
    for name in lost:
        same = {key: value for key, value in kept["results"][name].items() if key != "seconds"}
        assert {key: found[name][key] for key in same} == pytest.approx(same)
