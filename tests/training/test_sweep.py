"""Sweeps: their files, which runs halving stops, and the verdict."""

import json
import re
from pathlib import Path

import pytest
import yaml
from support.runs import cqwen_forked, metrics, write_config

from cqwen_dist.config import UserError
from cqwen_dist.config.one_job import read_sweep
from cqwen_dist.run.status import read_status
from cqwen_dist.training.together import Halving

ROOT = Path(__file__).parents[2]
BY = "eval/cls_loss_mean"
RATES = [3e-6, 3e-5, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.3]


def write_sweep(folder: Path, **keys: object) -> Path:
    stages = [{"name": "heads", "train": ["heads"], "steps": 16}]
    write_config(folder, stages=stages, train__eval_every=2, train__checkpoint_every=100)
    path = folder / "sweep.yml"
    path.write_text(yaml.safe_dump({"config": "config.yaml", "by": BY, **keys}))
    return path


@pytest.mark.slow
def test_halving_finds_the_best_of_the_grid_in_less_than_half_of_its_steps(tmp_path: Path) -> None:
    path, taken, found = write_sweep(tmp_path, keys={"stages.0.lr": RATES}), {}, {}
    for halving in (True, False):
        said = yaml.safe_load(path.read_text()) | {"halving": halving}
        path.write_text(yaml.safe_dump(said))
        done = cqwen_forked("sweep", path, f"run.dir={tmp_path / str(halving)}")
        assert done.returncode == 0, done.stderr[-2000:]
        *table, winner = done.stdout.splitlines()[-9:]
        folders = [tmp_path / str(halving) / str(i) for i in range(8)]
        taken[halving] = sum(len(metrics(folder)) for folder in folders)
        found[halving] = Path(winner.rpartition(", ")[2]), metrics(Path(winner.rpartition(", ")[2]))[-1][BY]
        assert re.match(rf"winner: lr=\S+: {BY} ", winner)
        assert len(table) == 8
    assert taken == {True: 40, False: 128}
    assert found[True][1] <= 1.01 * found[False][1]
    ends = [read_status(tmp_path / "True" / str(i)) for i in range(8)]
    assert sorted(status["step"] for status in ends) == [2, 2, 2, 2, 4, 4, 8, 16]
    reasons = [str(status["reason"]) for status in ends if status["status"] == "paused"]
    assert len(reasons) == 7
    assert all(re.match(rf"halving: {BY} \S+ at step [248], place \d of [842]$", reason) for reason in reasons)
    # The same command finds nothing to do, and the same verdict
    again = cqwen_forked("sweep", path, f"run.dir={tmp_path / 'True'}")
    assert again.returncode == 0
    assert again.stdout.splitlines()[-1].endswith(str(found[True][0]))


@pytest.mark.parametrize(("count", "kept"), [(8, [8, 4, 2, 2, 1]), (5, [5, 3, 2, 2, 1]), (2, [2, 2, 2, 2, 1])])
def test_the_worse_half_stops_after_an_nth_of_the_steps(count: int, kept: list[int]) -> None:
    assert [Halving(BY, count).kept(step, 800, 50) for step in (50, 100, 200, 399, 400)] == kept
    assert Halving(BY, count).kept(800, 800, 50) == count, "whoever took all steps is done"
    assert Halving(BY, 8).kept(100, 800, 300) == 8, "no evaluation yet"
    assert Halving(BY, 8).kept(300, 800, 300) == 2


def test_points_are_a_grid_or_drawn(tmp_path: Path) -> None:
    grid = {"loss.reg_weight": [1.0, 2.0], "stages.0.lr": [1e-3, 1e-2]}
    path = write_sweep(tmp_path, keys=grid, points=[{"loss.reg_weight": 3.0, "run.name": "heavy"}])
    _, runs = read_sweep(path, ["run.mirror=s3://store/"])
    assert [(run.loss.reg_weight, run.stages[0].lr) for run in runs[:4]] == [(1, 1e-3), (1, 1e-2), (2, 1e-3), (2, 1e-2)]
    names = ["reg_weight=1.0 lr=0.001", "reg_weight=1.0 lr=0.01", "reg_weight=2.0 lr=0.001", "reg_weight=2.0 lr=0.01"]
    assert [run.run.name for run in runs] == [*names, "heavy"]
    assert [run.run.dir for run in runs] == [str(tmp_path / "run" / str(i)) for i in range(5)]
    assert runs[3].run.mirror == "s3://store/3", "in one store, runs delete each other's checkpoints"
    ranges = {"stages.0.lr": {"low": 1e-5, "high": 1e-1, "log": True}, "model.causal_size": {"low": 4, "high": 16}}
    drawn = [read_sweep(write_sweep(tmp_path, keys=ranges, draws=40, seed=seed))[1] for seed in (0, 0, 1)]
    rates = [[run.stages[0].lr for run in runs] for runs in drawn]
    assert rates[0] == rates[1] != rates[2]
    assert all(1e-5 <= rate <= 1e-1 for rate in rates[0])
    assert 10 <= sum(rate < 1e-3 for rate in rates[0]) <= 30, "uniform in the logarithm"
    assert {run.model.causal_size for run in drawn[0]} == {*range(4, 17)} & {run.model.causal_size for run in drawn[0]}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"keys": {"stages.0.lr": [1e-3]}}, "keys: found 1 points, allowed: two or more"),
        ({"keys": {"stages.0.lr": {"low": 1e-3, "high": 1e-2}}}, "keys.stages.0.lr: found a range, allowed: low below"),
        ({"keys": {"stages.0.lr": {"low": 0, "high": 1, "log": True}}, "draws": 2}, "keys.stages.0.lr: found a range"),
        ({"keys": {"stages.0.rate": [1, 2]}}, "stages.0.rate"),
        (
            {"keys": {"train.precision": ["fp32", "bf16"]}},
            "run/1: train.precision: found 'bf16', allowed: 'fp32', as in",
        ),
        ({"kyes": {}}, "kyes: found {}, allowed: Extra inputs are not permitted"),
    ],
)
def test_a_sweep_that_cannot_run_is_refused_by_key(tmp_path: Path, keys: dict[str, object], said: str) -> None:
    with pytest.raises(UserError) as refused:
        read_sweep(write_sweep(tmp_path, **keys))
    assert said in str(refused.value)


def test_the_shipped_sweeps_are_valid() -> None:
    """S4 5.3 names the causal dimension and lambda: three values of each or more, with the config's own."""
    runs = read_sweep(ROOT / "configs" / "sensitivity.sweep.yml")[1]
    assert len({run.model.causal_size for run in runs}) >= 3
    assert len({run.loss.reg_weight for run in runs}) >= 3
    starts = read_sweep(ROOT / "configs" / "starts.sweep.yml")[1]
    assert [run.start for run in starts] == ["calibrated", "seed", "seed-100"]
    assert json.dumps([run.run.name for run in starts]) == '["start=calibrated", "start=seed", "start=seed-100"]'
