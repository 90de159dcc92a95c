"""Real daemons, real faults: whatever ends a start, the run ends done, with the losses of one that was left alone."""

import signal
from pathlib import Path

import psutil
import pytest
from support.runs import losses, wait_for
from support.slurm_cluster import Cluster
from support.slurm_runs import EVERY, STEPS, SlurmRun

from cqwen_dist.run.files import METRICS, read_lines
from cqwen_dist.run.status import read_status

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(three_nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of two nodes with one rank each, nothing in the way."""
    three_nodes.mend()
    run = SlurmRun(three_nodes, tmp_path_factory.mktemp("undisturbed"))
    job = run.submit("--nodes", 2)
    assert three_nodes.wait_end(job)["JobState"] == "COMPLETED", run.output(job)
    assert run.endings() == ["done"]
    assert len(losses(run.run)) == 2 * STEPS
    return losses(run.run)


@pytest.fixture
def run(cluster: Cluster, tmp_path: Path, undisturbed: list[float]) -> SlurmRun:
    return SlurmRun(cluster, tmp_path)


def rank_of(run: SlurmRun, number: int) -> psutil.Process:
    """The process of a rank, seen from outside of its host."""
    for process in psutil.process_iter():
        try:
            if "cqwen_dist.cluster.rank" in process.cmdline() and "deepspeed.launcher.launch" not in process.cmdline():
                environment = process.environ()
                if environment.get("RANK") == str(number) and process.cwd() == str(run.folder):
                    return process
        except psutil.Error:
            continue
    raise AssertionError(f"no rank {number}")


def test_a_job_warned_before_its_limit_saves_requeues_and_finishes(cluster, tmp_path, undisturbed) -> None:
    """The signal of the time limit, sent by hand: the limit's own clock ticks every 30 s (the test below)."""
    run = SlurmRun(cluster, tmp_path, train__checkpoint_every=10_000)  # so that what is saved was saved for the signal
    job = run.submit("--nodes", 2)
    wait_for("steps", lambda: len(list(read_lines(run.run / METRICS))) >= 2 * EVERY)
    cluster.slurm("scancel", "--batch", "--signal=USR1", job)
    wait_for("the stop", lambda: run.endings() == ["preempted"], 60)
    assert read_status(run.run)["status"] in ("preempted", "running")  # or it runs again already
    run.must_end_done(job, undisturbed)
    stopped_at = next(entry["step"] for entry in run.history() if entry.get("how") == "preempted")
    assert run.endings() == ["preempted", "done"]
    assert stopped_at >= 2 * EVERY
    assert [entry["step"] for entry in run.starts()] == [0, stopped_at], "no step was taken twice"
    said = run.cqwen("status", run.run).stdout
    assert f"preempted at step {stopped_at}" in said
    assert said.startswith(f"done, step {2 * STEPS} of {2 * STEPS}")


@pytest.mark.slow
def test_a_job_killed_by_its_time_limit_continues(cluster: Cluster, tmp_path: Path, undisturbed: list[float]) -> None:
    """A minute of warning in a limit of three: whatever is not done by then goes on in the next start."""
    run = SlurmRun(cluster, tmp_path, timeout_min=10.0)
    job = run.submit("--nodes", 2, "--time", 3, "--warn-s", 60)
    run.wait_saved(EVERY)
    ranks = [rank_of(run, number) for number in (0, 1)]
    for rank in ranks:  # as if its steps took minutes
        rank.suspend()
    wait_for("the warning", lambda: "told to stop" in run.output(job), 170)
    for rank in ranks:
        rank.resume()
    run.must_end_done(job, undisturbed)
    assert run.endings()[-1] == "done"
    assert set(run.endings()[:-1]) == {"preempted"}


def test_a_job_with_a_killed_rank_continues(run: SlurmRun, undisturbed: list[float]) -> None:
    job = run.submit("--nodes", 2)
    run.wait_saved(2 * EVERY)
    rank_of(run, 1).send_signal(signal.SIGKILL)
    run.must_end_done(job, undisturbed)
    assert run.endings() == ["lost", "done"]
    lost = next(entry for entry in run.history() if entry.get("how") == "lost")
    assert "rank 1" in lost["reason"]
    assert len(run.starts()) == 2


@pytest.mark.slow
def test_batch_host_is_lost_and_a_spare_takes_over(run: SlurmRun, cluster: Cluster, undisturbed: list[float]) -> None:
    job = run.submit("--nodes", 2)
    run.wait_saved(2 * EVERY)
    host = cluster.job(job)["BatchHost"]
    cluster.kill(host)
    run.must_end_done(job, undisturbed)
    assert host not in cluster.job(job)["NodeList"]
    assert len(run.starts()) == 2


@pytest.mark.slow
def test_a_job_continues_after_a_cut_link(run: SlurmRun, cluster: Cluster, undisturbed: list[float]) -> None:
    job = run.submit("--nodes", 2)
    run.wait_saved(2 * EVERY)
    host = next(name for name in ("node1", "node2", "node3") if name != cluster.job(job)["BatchHost"])
    cluster.cut(host)
    # Either SLURM misses the node and queues the job again, or the ranks' collective ends and the script does.
    wait_for("the loss", lambda: int(cluster.job(job)["Restarts"]) or run.endings(), 200)
    cluster.heal(host)
    run.must_end_done(job, undisturbed)
    assert 2 <= len(run.starts()) <= 4, "restarts are bounded"


def test_a_mistake_in_the_data_ends_the_job_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """Not queued again; the last lines of the rank that met it are in the job's output."""
    run = SlurmRun(cluster, tmp_path)
    good = (tmp_path / "texts.jsonl").read_text()
    (tmp_path / "texts.jsonl").write_text(good + "{oops\n")
    job = run.submit("--nodes", 2)
    ended = cluster.wait_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0")
    assert run.endings() == ["fatal"]
    assert "texts.jsonl:41: broken JSON" in run.output(job).partition("--- the last lines of")[2]
