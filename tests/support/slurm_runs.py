"""A tiny run on a SLURM cluster: submitted as a user would, watched by its own files."""

import re
import sys
from pathlib import Path
from typing import Any

from support.runs import losses, metrics, wait_for, write_config
from support.slurm_cluster import Cluster

from cqwen_dist.cluster.job import read_history
from cqwen_dist.run.status import read_status

STEPS = 60  # of each of the two stages
EVERY = 10  # steps between checkpoints


class SlurmRun:
    """A run's folder, config and jobs."""

    def __init__(self, cluster: Cluster, folder: Path, timeout_min: float = 0.6, **overrides: Any) -> None:
        """timeout_min: that ranks wait for each other."""
        self.cluster, self.folder, self.run = cluster, folder, folder / "run"
        self.python = ("env", f"CQWEN_TIMEOUT_MIN={timeout_min}", sys.executable)
        steps = {f"stages__{i}__steps": STEPS for i in (0, 1)}
        usual = {"train__checkpoint_every": EVERY, "train__keep_checkpoints": 2, "model__lora__dropout": 0.1}
        self.config = write_config(folder, **{**steps, **usual, **overrides})

    def cqwen(self, *words: object, timeout: float = 100.0) -> Any:
        """A command of a person at the head."""
        return self.cluster.run_on("head", *self.python, "-m", "cqwen_dist", *words, cwd=self.folder, timeout=timeout)

    def submit(self, *options: object) -> str:
        """The job's id."""
        done = self.cqwen("submit", self.config, *options)
        assert done.returncode == 0, done.stderr
        found = re.match(r"job (\d+)", done.stdout)
        assert found is not None, done.stdout
        return found[1]

    @property
    def saved(self) -> int:
        """Step of the newest checkpoint."""
        try:
            return int((self.run / "latest").read_text().strip()[-8:])
        except (OSError, ValueError):
            return 0

    def wait_saved(self, step: int, timeout: float = 150.0) -> None:
        def there() -> bool:
            assert read_status(self.run)["status"] != "done", "the test was too late to interrupt"
            return self.saved >= step

        wait_for(f"a checkpoint of step {step} in {self.run}", there, timeout, every=0.02)

    def history(self) -> list[dict[str, Any]]:
        """Empty until the first start: the batch script begins some time after `submit` returns."""
        return read_history(self.run)

    def endings(self) -> list[str]:
        return [entry["how"] for entry in self.history() if entry["event"] == "end"]

    def starts(self) -> list[dict[str, Any]]:
        return [entry for entry in self.history() if entry["event"] == "start"]

    def output(self, job: str) -> str:
        """What the batch script said."""
        return (self.run / "slurm" / f"{job}.out").read_text(errors="replace")

    def must_end_done(self, job: str, like: list[float], timeout: float = 250.0) -> None:
        """COMPLETED, every step logged once, losses equal to the undisturbed run's."""
        ended = self.cluster.wait_end(job, timeout)
        assert ended["JobState"] == "COMPLETED", self.output(job)
        assert read_status(self.run)["status"] == "done"
        assert [record["step"] for record in metrics(self.run)] == list(range(1, 2 * STEPS + 1))
        assert losses(self.run) == like, "losses of a run that was disturbed are those of one that was not"
