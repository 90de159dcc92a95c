"""`benchmarks numbers`: a whole run."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.runs import cqwen_forked

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
