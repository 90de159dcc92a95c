"""What the batch script asks: how a start ended, and whether to queue the job again. No SLURM here."""

import json
from pathlib import Path

import pytest
from support.runs import write_config

from cqwen_dist.cluster.job import begin, fruitless_starts, guilty_log, judge, read_history
from cqwen_dist.config import UserError
from cqwen_dist.run.status import write_status


class Starts:
    """A run's folder and a job that is started and ends again and again."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config, self.run, self.patch, self.count = write_config(folder), folder / "run", monkeypatch, -1
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")

    def start(self, restarts: int = 2, number: int | None = None) -> Path:
        self.count = self.count + 1 if number is None else number
        self.patch.setenv("SLURM_RESTART_COUNT", str(self.count))
        run, logs = begin(self.config, [], restarts)
        assert (run, logs) == (self.run, self.run / "slurm" / "job-7" / f"start-{self.count}")
        return logs

    def end(self, code: int = 1, asked: str = "no", restarts: int = 2, phase: str = "train") -> tuple[str, str]:
        verdict, _ = judge(self.run, self.run / "slurm" / "latest", phase, code, asked, restarts)
        return verdict, read_history(self.run)[-1]["how"]

    def save(self, step: int) -> None:
        (self.run / "latest").write_text(f"step-{step:08d}\n")

    def rank_ends(self, rank: int, how: str, at: float = 0.0, log: str = "", message: str = "m") -> None:
        logs = self.run / "slurm" / "latest"
        (logs / f"rank-{rank}.log").write_text(log)
        if how:
            ending = {"rank": rank, "host": "h", "time": at, "how": how, "message": message}
            (logs / f"rank-{rank}.ended").write_text(json.dumps(ending))


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    return Starts(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("status", "code", "asked", "verdict", "how"),
    [
        ("done", 0, "no", "done", "done"),
        ("preempted", 0, "no", "requeue 0", "preempted"),
        ("preempted", 0, "TERM", "stopped", "cancelled"),
        ("running", 137, "no", "requeue 10", "lost"),
        ("running", 138, "USR1", "requeue 0", "preempted"),
        ("fatal", 1, "no", "failed", "fatal"),
    ],
)
def test_classifies_how_start_ended(starts: Starts, status: str, code: int, asked: str, verdict: str, how: str) -> None:
    starts.start()
    write_status(starts.run, status, reason="because")
    assert starts.end(code, asked) == (verdict, how)


@pytest.mark.parametrize(("first", "second"), [("done", "preempted"), ("preempted", "done"), ("fatal", "preempted")])
def test_a_job_of_two_runs_goes_on_if_one_of_them_has_to(
    starts: Starts, tmp_path: Path, first: str, second: str
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(starts.config.read_text().replace(str(starts.run), str(tmp_path / "other")))
    begin(starts.config, [str(other)], 2)
    (tmp_path / "other").mkdir()
    for folder, status in ((starts.run, first), (tmp_path / "other", second)):
        write_status(folder, status, reason="TERM")
    assert starts.end(0, "USR1") == ("requeue 0", "preempted")
    begin(starts.config, [str(other)], 2)
    for folder in (starts.run, tmp_path / "other"):
        write_status(folder, "done")
    assert starts.end(0) == ("done", "done")


def test_a_status_of_an_earlier_start_is_ignored(starts: Starts) -> None:
    starts.run.mkdir()
    write_status(starts.run, "fatal")
    starts.start()
    assert starts.end() == ("requeue 10", "lost")


def test_a_rank_that_failed_by_itself_is_fatal_whatever_the_status_says(starts: Starts) -> None:
    """The peers of a rank that raised see a lost connection first, and may be the ones to write the status."""
    starts.start()
    write_status(starts.run, "running", reason="all-reduce failed")
    starts.rank_ends(0, "may pass", at=1.0, log="gloo\n")
    starts.rank_ends(1, "failed", at=2.0, log="ValueError: mine\n")
    assert starts.end() == ("failed", "fatal")
    log = guilty_log(starts.run / "slurm" / "latest")
    assert log is not None
    assert log.read_text() == "ValueError: mine\n"


def test_when_all_ranks_lost_each_other_the_first_to_notice_is_shown(starts: Starts) -> None:
    """A link that was cut: nobody is guilty."""
    starts.start()
    starts.rank_ends(0, "may pass", at=2.0)
    starts.rank_ends(1, "may pass", at=1.0)
    assert starts.end() == ("requeue 10", "lost")
    log = guilty_log(starts.run / "slurm" / "latest")
    assert log is not None
    assert log.name == "rank-1.log"


def test_unfit_nodes_end_the_job_but_a_hanging_preflight_does_not(starts: Starts) -> None:
    starts.start()
    assert starts.end(1, phase="preflight") == ("failed", "fatal")
    starts.start()
    assert starts.end(124, phase="preflight")[1] == "lost"
    starts.start()
    assert starts.end(74, phase="preflight")[1] == "lost", "srun's own failure says nothing of the nodes"


def test_restarts_without_a_new_checkpoint_are_limited_and_back_off(starts: Starts) -> None:
    starts.start()
    assert starts.end() == ("requeue 10", "lost")
    starts.start()
    assert starts.end() == ("requeue 20", "lost")
    starts.start()
    assert starts.end() == ("failed", "lost")
    with pytest.raises(UserError, match="3 starts in a row without a new checkpoint"):
        starts.start()


def test_a_new_checkpoint_a_clean_stop_or_a_manual_job_reset_the_restart_count(starts: Starts) -> None:
    for step in (0, 0, 20):
        starts.start()
        starts.save(step)
        verdict, _ = starts.end()
    assert verdict == "requeue 10"
    for _ in range(5):
        starts.start()
        write_status(starts.run, "preempted")
        assert starts.end(0) == ("requeue 0", "preempted")
    assert fruitless_starts(read_history(starts.run)) <= 1
    starts.start(number=0)
    assert starts.end()[0] == "requeue 10"
