"""The real launcher, real signals: a rank killed, Ctrl-C, and the same command until it is done."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.runs import command_environment, cqwen, losses, metrics, train_run, write_config

from cqwen_dist.checkpoint.manifest import latest_checkpoint
from cqwen_dist.checkpoint.status import read_status

STEPS = 16  # of each of the two stages


def wait_for(what: str, condition: object, timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what}: not after {timeout} s"
        time.sleep(0.01)


class Launched:
    """`cqwen launch` with two ranks, running."""

    def __init__(self, config: Path, *overrides: str) -> None:
        command = [sys.executable, "-m", "cqwen_dist", "launch", str(config), "--ranks", "2", *overrides]
        self.log = (config.parent / "log").open("a+")
        self.process = subprocess.Popen(command, env=command_environment(), stdout=self.log, stderr=self.log)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def rank(self, number: int) -> psutil.Process:
        for process in self.family():
            if "train" in process.cmdline() and process.environ().get("RANK") == str(number):
                return process
        raise AssertionError(f"no rank {number} among {self.family()}")

    def end(self, family: list[psutil.Process], timeout: float = 60.0) -> int:
        """The exit code; nobody of the family may be left."""
        code = self.process.wait(timeout)
        alive = [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        for process in alive:
            process.kill()
        assert not alive, f"orphans: {alive}"
        return code


def step_of(run: Path) -> int:
    try:
        return int((run / "latest").read_text().strip()[-8:])
    except (OSError, ValueError):
        return 0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps = {f"stages__{i}__steps": STEPS for i in (0, 1)}
    folder = tmp_path_factory.mktemp("kill; $(touch x) '数'")
    return write_config(folder, train__checkpoint_every=4, model__lora__dropout=0.1, **steps)


def test_killed_and_gone_on_it_is_the_run_that_was_never_interrupted(config: Path) -> None:
    run = config.parent / "run"

    first = Launched(config)
    wait_for("a checkpoint", lambda: step_of(run) >= 4)
    family = first.family()
    first.rank(1).send_signal(signal.SIGKILL)
    assert first.end(family) == 1
    killed_at = step_of(run)
    assert 4 <= killed_at < 2 * STEPS, "the test was too late to interrupt"
    assert latest_checkpoint(run) is not None

    again = cqwen("launch", config, "--ranks", 2)
    assert (again.returncode, again.stderr) == (0, "")
    assert f"step-{killed_at:08d}" in "".join(again.stdout.split())
    assert read_status(run)["status"] == "done"

    train_run(config, f"run.dir={config.parent}/reference", world=2)
    reference = config.parent / "reference"
    assert [record["step"] for record in metrics(run)] == list(range(1, 2 * STEPS + 1))
    assert losses(run) == losses(reference)
    files = []
    for folder in (latest_checkpoint(run), latest_checkpoint(reference)):
        assert folder is not None
        records = json.loads((folder / "manifest.json").read_text())["files"]
        files.append({name: record["sha256"] for name, record in records.items() if name.endswith(".safetensors")})
    assert files[0] == files[1], "weights and moments equal to the bit"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_to_the_command_alone_leaves_nobody(config: Path, number: signal.Signals) -> None:
    """SIGTERM as a batch system sends it, SIGINT as Ctrl-C does."""
    run = config.parent / number.name
    launched = Launched(config, f"run.dir={run}")
    wait_for("ranks", lambda: read_status(run)["status"] == "running")
    family = launched.family()
    assert len([p for p in family if "train" in p.cmdline()]) >= 2
    launched.process.send_signal(number)
    assert launched.end(family) == 1
    assert "stopping the ranks" in (config.parent / "log").read_text()


def test_a_users_mistake_on_two_ranks_is_one_line_and_no_hang(config: Path) -> None:
    bad = config.parent / "bad.jsonl"
    bad.write_text('{"text": "a 1"}\n{oops\n')
    done = cqwen("launch", config, "--ranks", 2, f"data.train={bad}", f"run.dir={config.parent}/bad", timeout=100)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(f"error: {bad}:2: broken JSON")
    assert read_status(config.parent / "bad")["status"] == "fatal"


def test_a_run_that_is_done_is_told_at_once(two_ranks: Path) -> None:
    done = cqwen("launch", two_ranks.parent / "config.yaml", "--ranks", 2)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"already done: {two_ranks}\n", "")
