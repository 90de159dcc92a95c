"""Real daemons, nothing in the way: the shipped scripts, submit, doctor, status, and ssh."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.runs import losses, metrics, train_run
from support.slurm_cluster import Cluster, wait_for
from support.slurm_runs import EVERY, STEPS, SlurmRun

from cqwen_dist.cluster.rank import Order
from cqwen_dist.run.status import read_status

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
HOSTILE = "a'; echo foo"


def test_the_shipped_script_on_two_nodes_with_two_ranks_each(cluster: Cluster, tmp_path: Path) -> None:
    """sbatch and nothing else: a rank a (pretended) GPU; the folder has a name that shells would read."""
    folder = tmp_path / f"{HOSTILE} $(touch x) 50%d"
    folder.mkdir()
    run = SlurmRun(cluster, folder, stages__0__steps=10, stages__1__steps=10)
    words = [
        *("--nodes=2", "--gpus-per-node=2"),
        f"--export=ALL,CQWEN_PYTHON={sys.executable}",
        ROOT / "slurm/train.sbatch",
    ]
    job = cluster.slurm("sbatch", "--parsable", *words, run.config, "train.micro_batch_size=3", cwd=folder).strip()
    ended = cluster.wait_end(job)
    said = (folder / f"cqwen-{job}.out").read_text()
    assert ended["JobState"] == "COMPLETED", said
    assert read_status(run.run)["status"] == "done"
    assert len(losses(run.run)) == 20
    assert json.loads((run.run / "environment.json").read_text())["ranks"] == 4
    logs = run.run / "slurm" / "latest"
    names = {path.name for path in logs.iterdir()}
    assert {"rank-0.log", "rank-3.log", "preflight.log", "environment.txt"} <= names
    assert "SLURM_JOB_NODELIST=node[1-2]" in (logs / "environment.txt").read_text()
    preflight = (logs / "preflight.log").read_text()
    assert "16 MiB" in preflight
    assert "nothing wrong was found" in preflight
    assert "note: 2 ranks on a node share its 1 cores" in said
    words = ["--cpus-per-task=2", f"--export=NONE,CQWEN_PYTHON={sys.executable}", ROOT / "slurm/export.sbatch"]
    job = cluster.slurm("sbatch", "--parsable", *words, run.run, folder / "out", cwd=folder).strip()
    assert cluster.wait_end(job)["JobState"] == "COMPLETED", (folder / f"cqwen-{job}.out").read_text()
    assert (folder / "out" / "config.json").is_file()
    assert f"Comment={run.run}" in cluster.slurm("scontrol", "show", "job", job)
    assert not (folder / "x").exists()


def test_a_submitted_job_is_one_run(cluster: Cluster, tmp_path: Path) -> None:
    """On two nodes; status tells of the job before and after it has run."""
    run = SlurmRun(cluster, tmp_path, stages__0__steps=6, stages__1__steps=6, model__lora__dropout=0.0)
    words = ["--nodes", 2, "--name", HOSTILE, "--sbatch=--export=NONE", "--setup", "true $OF_NOBODY"]
    done = run.cqwen("submit", run.config, *words)
    assert done.returncode == 0, done.stderr
    (job,) = re.findall(r"^job (\d+)", done.stdout, re.MULTILINE)
    assert cluster.wait_end(job)["JobState"] == "COMPLETED", run.output(job)
    assert [entry["nodes"] for entry in run.starts()] == ["node[1-2]"]
    assert read_status(run.run)["status"] == "done"
    train_run(run.config, f"run.dir={tmp_path}/whole")
    assert losses(run.run) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    document = json.loads(run.cqwen("status", job, "--json").stdout)
    assert (document["run"], document["status"], document["step"]) == (str(run.run), "done", 12)
    assert document["job"]["JobState"] == "COMPLETED"
    assert f"JobName={HOSTILE}" in cluster.slurm("scontrol", "show", "job", job)


def test_two_runs_of_one_job_queue_again_together(cluster: Cluster, tmp_path: Path) -> None:
    run = SlurmRun(cluster, tmp_path)
    other = tmp_path / "other.yaml"
    other.write_text(
        run.config.read_text().replace(str(run.run), str(tmp_path / "other")) + "loss: {reg_weight: 2.0}\n"
    )
    job = run.submit(other)
    wait_for("a checkpoint of the second", lambda: (tmp_path / "other" / "latest").is_file(), every=0.02)
    cluster.slurm("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait_end(job)["JobState"] == "COMPLETED", run.output(job)
    assert [entry["event"] for entry in run.history()] == ["start", "end"] * 2
    assert run.endings() == ["preempted", "done"]
    assert [read_status(folder)["status"] for folder in (run.run, tmp_path / "other")] == ["done", "done"]
    assert losses(run.run) != losses(tmp_path / "other")


class Hosts:
    """A hostfile for two nodes, and `cqwen launch` on the first of them."""

    def __init__(self, run: SlurmRun, slots: int) -> None:
        self.run, self.cluster = run, run.cluster
        self.file = run.folder / "hosts"
        self.file.write_text(f"# two nodes\nnode1 slots={slots}\nnode2  slots={slots}\n")

    def command(self, *more: object) -> list[str]:
        words = ["launch", self.run.config, "--hostfile", self.file, *more]
        return self.cluster.on("node1", sys.executable, "-m", "cqwen_dist", *words, cwd=self.run.folder)

    def left(self, kind: str = "") -> list[psutil.Process]:
        """Processes of the launch that are still there, those with `kind` in their command line."""
        found = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                if "cqwen_dist.cluster.rank" in words and Order.decode(words[-1]).folder == str(self.run.folder):
                    found += [process] if kind in " ".join(words) else []
            except (psutil.Error, ValueError):
                continue
        return found


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is not installed")
def test_launch_over_ssh_finishes_and_stops_cleanly(cluster: Cluster, tmp_path: Path) -> None:
    """Hostile names pass two shells; a stop saves on both hosts and gives 75; the same command ends done."""
    folder = tmp_path / f"{HOSTILE} $(touch x)"
    folder.mkdir()
    run = SlurmRun(cluster, folder)
    hosts = Hosts(run, 1)
    log = (folder / "log").open("w")
    started = subprocess.Popen(hosts.command(), env=cluster.environment(), stdout=log, stderr=log, cwd=folder)
    run.wait_saved(2 * EVERY)
    began = time.monotonic()
    (command,) = psutil.Process(started.pid).children()  # nsenter's child; a signal to it alone
    command.terminate()
    code = started.wait(60)
    stopped_s = time.monotonic() - began
    said = (folder / "log").read_text()
    assert code == 75, said
    assert "nothing wrong was found" in said
    assert read_status(run.run)["status"] == "preempted"
    assert run.saved > 2 * EVERY
    assert stopped_s < 40
    assert hosts.left() == []
    again = subprocess.run(
        hosts.command("--no-preflight"),
        env=cluster.environment(),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=250,
    )
    assert again.returncode == 0, again.stderr
    assert [record["step"] for record in metrics(run.run)] == list(range(1, 2 * STEPS + 1))
    assert not list(folder.rglob(".environment-*")), "the ranks' environment does not stay behind"
    assert not (folder / "x").exists()
    assert hosts.left() == []
