"""From sbatch to the first step: what SLURM, the imports and the first batch take, and what is this package's own.

`pytest tests/cluster/test_slurm_timeline.py -m cluster -s` prints the table.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.slurm_cluster import Cluster
from support.slurm_runs import SlurmRun

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
# What appears, in order, and what the time up to it is spent on.
MARKS = [
    ("batch script began", "SLURM starts the job; the config is checked (ours)"),
    ("preflight began", "names, environment, srun"),
    ("preflight ended", "the doctor on all nodes (ours; --no-preflight leaves it out)"),
    ("launcher began", "srun"),
    ("ranks began", "DeepSpeed's launcher imports torch"),
    ("run opened", "ranks import torch, transformers, DeepSpeed; data and model"),
    ("first step", "calibration, first evaluation, first step"),
    ("run done", "the other steps"),
    ("ranks ended", "the ranks' processes end"),
    ("script over", "the launcher looks once a second, srun; the verdict (ours)"),
]


def test_time_from_sbatch_to_the_first_step(cluster: Cluster, tmp_path: Path) -> None:
    run = SlurmRun(cluster, tmp_path, stages__0__steps=3, stages__1__steps=3)
    slurm = run.run / "slurm"

    def there(pattern: str, text: str = "") -> Callable[[], bool]:
        return lambda: any(re.search(text, path.read_text(errors="replace")) for path in run.run.glob(pattern))

    conditions = [
        there("slurm/history.jsonl", '"start"'),
        there("slurm/latest/preflight.log"),
        there("slurm/latest/preflight.log", "nothing wrong|remedy"),
        there("slurm/latest/node*.log"),
        there("slurm/latest/rank-0.log"),
        there("lock"),
        there("metrics.jsonl", "."),
        there("status.json", '"status": "done"'),
        there("slurm/latest/rank-0.ended"),
        there("slurm/history.jsonl", '"end"'),
    ]
    before = time.monotonic()
    run.submit("--nodes", 2)
    began, seen = time.monotonic(), []
    while len(seen) < len(conditions):
        assert time.monotonic() - began < 200, f"{MARKS[len(seen)][0]} never came: {list(slurm.iterdir())}"
        if conditions[len(seen)]():
            seen.append(time.monotonic() - began)
        time.sleep(0.01)
    began_bare = time.monotonic()
    cluster.slurm("srun", "-N2", sys.executable, "-c", "import cqwen_dist.training.train, deepspeed")
    bare = time.monotonic() - began_bare
    print(f"\n  {began - before:6.2f} s  cqwen submit itself")
    for (name, spent), at, last in zip(MARKS, seen, [0.0, *seen], strict=False):
        print(f"  {at:6.2f} s  {name:20} +{at - last:5.2f}  {spent}")
    print(f"  {bare:6.2f} s  beside it: srun of the ranks' imports alone, on both nodes")
    own = (seen[2] - seen[1]) + (seen[9] - seen[8])
    assert own < seen[6], "the preflight and the verdict take less than everything else on the way to a step"
