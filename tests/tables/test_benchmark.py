"""`cqwen bench numbers`: its scores, its laws, the heads that it compares with, and a whole run."""

import json
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.runs import cqwen_forked

from cqwen_dist.config import UserError
from cqwen_dist.tables.benchmark import OURS, QUANTILES, Benchmark, laws, page, scored
from cqwen_dist.tables.heads import Examples, digit_head, mean_head, quantile_head


def test_of_a_point_the_crps_is_the_absolute_error() -> None:
    truth = np.random.default_rng(0).normal(size=50)
    found = scored(np.zeros((50, 7)), truth)
    assert found["crps"] == pytest.approx(found["mae"]) == pytest.approx(np.abs(truth).mean())
    assert found["width_90"] == found["coverage_90"] == 0


def test_of_true_quantiles_it_is_near_the_crps_and_the_interval_holds_90_percent() -> None:
    """The CRPS of a normal law is sigma / sqrt(pi); seven quantiles come within 5 %, 20,000 draws within 1 %."""
    truth = np.random.default_rng(0).normal(3.0, 2.0, 20_000)
    quantiles = np.array([NormalDist(3.0, 2.0).inv_cdf(at) for at in QUANTILES])
    found = scored(np.tile(quantiles, (len(truth), 1)), truth)
    assert found["crps"] == pytest.approx(2.0 / np.sqrt(np.pi), rel=0.06)
    assert found["coverage_90"] == pytest.approx(0.9, abs=0.01)
    assert found["width_90"] == pytest.approx(2 * 2.0 * 1.6449, rel=1e-3)


@pytest.mark.parametrize(("name", "draw"), [("Cauchy", "standard_cauchy"), ("Laplace", "laplace"), ("Gauss", "normal")])
def test_errors_are_likeliest_under_their_own_law(name: str, draw: str) -> None:
    error = getattr(np.random.default_rng(1), draw)(size=2000)
    found = laws(error)
    others = [of["log_likelihood"] for law, of in found.items() if law not in (name, "Student t")]
    assert found[name]["log_likelihood"] > max(others)
    assert found[name]["coverage_90"] == pytest.approx(0.9, abs=0.03)


def test_heads_learn_what_features_say() -> None:
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(400, 6, generator=draw)
    y = (100 + 20 * z[:, 0] + 5 * torch.randn(400, generator=draw)).double().numpy()
    train, valid, test = np.arange(200), np.arange(200, 250), np.arange(250, 400)
    rows = Examples.of(z, y, train, valid)
    mean_of, spread = mean_head(rows)
    error = mean_of[test] - y[test]
    assert 4 < spread < 8
    assert np.sqrt(np.square(error).mean()) < 8  # 5 is the noise, 20 what can be told
    for head in (quantile_head, digit_head):
        found = scored(head(rows, QUANTILES)[test], y[test])
        assert found["rmse"] < 10
        assert 0.75 < found["coverage_90"] < 0.98


def test_an_unknown_set_is_refused_and_one_without_a_file_is_left_out_by_name(tmp_path: Path) -> None:
    said: list[str] = []
    benchmark = Benchmark(tmp_path, tmp_path / "out", "base", 1.0, True, said.append)
    with pytest.raises(UserError, match="--only: found 'boston', allowed: out of concrete, energy"):
        benchmark.run(["boston"], 1)
    assert benchmark.run(["energy", "gsm8k"], 1)["sets"] == {}
    assert [line.partition(":")[0] for line in said] == ["energy", "gsm8k"]


@pytest.mark.slow
def test_a_set_is_measured_once_and_its_page_names_every_model(one_rank: Path, tmp_path: Path) -> None:
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
    again = cqwen_forked(*command)
    assert "split 0" not in again.stdout
    assert json.loads((tmp_path / "out" / "numbers.json").read_text())["sets"] == document["sets"]
