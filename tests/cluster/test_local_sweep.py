"""launch/sweep.sh: the points of a sweep one after the other, here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import command_environment, write_config

from cqwen_dist.cluster.job import sweep_point
from cqwen_dist.config import load_config

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_local_sweep_trains_two_points(tmp_path: Path) -> None:
    """The start is what the points say, and a second call finds both done."""
    config = write_config(tmp_path, stages=[{"name": "heads", "train": ["heads"], "steps": 1}])
    points = tmp_path / "points"
    points.write_text("# starts\nmodel.causal_size=8\n\nstart=seed loss.reg_weight=10\n")
    command = [ROOT / "launch" / "sweep.sh", "1", config, points]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for word in ("run 1 of 2", "already done"):
        done = subprocess.run(
            command, env={**command_environment(), "PATH": path}, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert word in done.stdout
    starts = [json.loads((tmp_path / "run" / n / "start.json").read_text())["eval"] for n in "01"]
    assert abs(starts[1]["dist/U_scale_median"] - 1.3133) < 1e-3  # the seeds' gamma_0
    assert starts[0]["eval/cls_loss_mean"] != starts[1]["eval/cls_loss_mean"]


@pytest.mark.parametrize("name", ["sensitivity", "starts"])
def test_the_shipped_points_are_valid_configs(name: str) -> None:
    points, config = ROOT / "configs" / f"{name}.points", ROOT / "configs" / "quickstart.yaml"
    count = sum(1 for line in points.read_text().splitlines() if line.strip() and not line.startswith("#"))
    names = [load_config(*_split(sweep_point(n, config, points, []))).run.name for n in range(count)]
    assert len(set(names)) == count > 2


def test_the_sensitivity_sweep_has_the_causal_dimension_and_lambda() -> None:
    """S4 5.3 names these two; three values of each or more, with the config's own."""
    words = (ROOT / "configs" / "sensitivity.points").read_text().split()
    for key in ("model.causal_size", "loss.reg_weight"):
        assert len({word for word in words if word.startswith(f"{key}=")}) >= 2, key


def _split(words: list[str]) -> tuple[Path, list[str]]:
    return Path(words[0]), words[1:]
