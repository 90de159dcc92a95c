"""Two ranks give the same weights on one host and on two, whoever starts them. Hosts and SLURM daemons are real."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import weights
from support.slurm_cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
CQWEN = [sys.executable, "-m", "cqwen_dist"]


@pytest.fixture
def environment(cluster: Cluster) -> dict[str, str]:
    own = cluster.environment()
    return {**own, "PATH": f"{Path(sys.executable).parent}:{own['PATH']}", "CQWEN_PYTHON": sys.executable}


@pytest.mark.parametrize("starter", ["one host", "two hosts", "two hosts by ssh", "cqwen launch", "sbatch"])
def test_every_starter_gives_the_same_weights(
    cluster: Cluster, two_ranks: Path, tmp_path: Path, environment: dict[str, str], starter: str
) -> None:
    run, config, hosts = tmp_path / "run", two_ranks.parent / "config.yaml", tmp_path / "hosts"
    hosts.write_text("node1 slots=1\nnode2 slots=1\n")
    # What ssh does not carry to the other host.
    kept = ("DS_ACCELERATOR", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
    (tmp_path / ".deepspeed_env").write_text("".join(f"{name}={environment[name]}\n" for name in kept))
    if starter == "two hosts by ssh" and shutil.which("pdsh") is None:
        pytest.skip("pdsh is not installed")
    change, launch = f"run.dir={run}", ROOT / "launch"
    if starter == "sbatch":
        ranks = "--export=ALL,CQWEN_RANKS_PER_NODE=1"
        words = ["--parsable", "--nodes=2", ranks, ROOT / "slurm" / "train.sbatch", config, change]
        line = cluster.on("head", "sbatch", *words, cwd=tmp_path)
        job = subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout.strip()
        assert cluster.wait_end(job)["JobState"] == "COMPLETED", (tmp_path / f"cqwen-{job}.out").read_text()
    else:
        lines = {
            "one host": [("node1", launch / "local.sh", config, 2, change)],
            "two hosts": [
                (f"node{rank + 1}", launch / "nodes.sh", config, hosts, rank, cluster.address("node1"), change)
                for rank in range(2)
            ],
            "two hosts by ssh": [("node1", launch / "hosts.sh", config, hosts, change)],
            "cqwen launch": [("node1", *CQWEN, "launch", "--ranks", 2, config, change)],
        }[starter]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        commands = [cluster.on(host, *words, cwd=tmp_path) for host, *words in lines]
        for process in [subprocess.Popen(line, env=environment, **pipes) for line in commands]:  # type: ignore[call-overload]
            said, _ = process.communicate()
            assert process.returncode == 0, said[-3000:]
    assert weights(run) == weights(two_ranks)
