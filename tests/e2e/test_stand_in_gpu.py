"""Runs on a GPU's stand-in (support/stand_in_gpu.py): the branches of a GPU, with the CPU's losses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.runs import metrics, train_run, write_config
from support.stand_in_gpu import ASKED, SETTINGS

TESTS = Path(__file__).parents[1]
RUNS: dict[str, dict[str, Any]] = {
    "numbers": {
        "data__pack": True,
        "model__attention": "varlen",
        "model__candidates": "arithmetic",
        "model__wide": [64, 32],
    },
    "offload": {"parallel__offload": "optimizer", "loss__constraint": {"mode": "dual", "eps": 0.05}},
    "zero 3": {"parallel__zero_stage": 3},
}


def stand_in(*words: object) -> subprocess.CompletedProcess[str]:
    """Python with these words, in an environment that asks for the stand-in."""
    path = os.pathsep.join((str(TESTS), str(TESTS.parent)))
    environment = {**os.environ, **SETTINGS, ASKED: "1", "PYTHONPATH": path}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_runs_on_the_stand_in_have_the_cpus_losses(tmp_path: Path, name: str) -> None:
    """bf16, as the GPU's kernels need it; they round otherwise, by at most 2^-8 of a term."""
    steps = {"stages__0__steps": 2, "stages__1__steps": 1}  # Triton's interpreter takes a second for each
    config = write_config(tmp_path, train__precision="bf16", **steps, **RUNS[name])
    train_run(config)
    done = stand_in("-m", "support.stand_in_gpu", "train", config, f"run.dir={tmp_path}/gpu")
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = ([record["train/total_loss"] for record in metrics(tmp_path / run)] for run in ("gpu", "run"))
    assert json.loads((tmp_path / "gpu" / "environment.json").read_text())["gpus"] == ["stand-in"]
    assert len(ours) == 3
    assert ours == pytest.approx(theirs, rel=1e-3)
