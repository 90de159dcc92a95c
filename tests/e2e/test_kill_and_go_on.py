"""The real launcher, real signals: told to stop, a rank killed, and the same command until it is done."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil
import pytest
from support.runs import command_environment, cqwen, end_of, losses, metrics, train_run, wait_for, write_config

from cqwen_dist.checkpoint.manifest import latest_checkpoint
from cqwen_dist.run.status import read_status

STEPS = 16  # of each of the two stages
_logs = count()


class Launched:
    """`cqwen launch` with two ranks, running."""

    def __init__(self, config: Path, *overrides: str) -> None:
        command = [sys.executable, "-m", "cqwen_dist", "launch", str(config), "--ranks", "2", *overrides]
        self.log = config.parent / f"log-{next(_logs)}"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=command_environment(), stdout=log, stderr=log)

    def at_work(self, run: Path) -> list[psutil.Process]:
        """All that it has started, once the run has begun; found before what is to be interrupted, as it takes time."""
        wait_for("ranks", lambda: read_status(run)["status"] == "running")
        return self.family()

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def ends(self, family: list[psutil.Process], code: int) -> None:
        """It ends with this exit code, and nobody of the family is left."""
        found = end_of(self.process, self.log)
        alive = alive_of(family)
        for process in alive:
            process.kill()
        assert not alive, f"orphans: {alive}"
        assert found == code, self.log.read_text()


def alive_of(family: list[psutil.Process]) -> list[psutil.Process]:
    alive = []
    for process in family:
        with suppress(psutil.NoSuchProcess):  # it may end at any moment
            alive += [process] if process.is_running() and process.status() != psutil.STATUS_ZOMBIE else []
    return alive


def rank_of(family: list[psutil.Process], number: int) -> psutil.Process:
    for process in family:
        if "train" in process.cmdline() and process.environ().get("RANK") == str(number):
            return process
    raise AssertionError(f"no rank {number} among {family}")


@pytest.fixture
def launch() -> Iterator[Callable[..., Launched]]:
    """Starts a `Launched`; whatever becomes of the test, none of it outlives it."""
    started: list[Launched] = []

    def begin(config: Path, *overrides: str) -> Launched:
        started.append(Launched(config, *overrides))
        return started[-1]

    yield begin
    for launched in started:
        if launched.process.poll() is None:
            for process in launched.family():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            launched.process.kill()


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


@pytest.mark.slow  # tests/crash/test_stopping.py is its short form
def test_stopped_and_killed_run_resumes_equal_to_undisturbed_run(config: Path, launch: Callable[..., Launched]) -> None:
    run = config.parent / "run"

    told = launch(config)
    family = told.at_work(run)
    wait_for("a checkpoint", lambda: step_of(run) >= 4, every=0.01)
    told.process.send_signal(signal.SIGTERM)
    told.ends(family, 75)
    status = read_status(run)
    stopped_at = step_of(run)
    assert (status["status"], status["step"], status["restarts"]) == ("preempted", stopped_at, 0)
    assert 4 <= stopped_at < 2 * STEPS, "the test was too late to stop it"

    killed = launch(config)
    family = killed.at_work(run)
    rank = rank_of(family, 1)
    wait_for("a checkpoint", lambda: step_of(run) >= stopped_at + 4, every=0.01)
    rank.send_signal(signal.SIGKILL)
    killed.ends(family, 1)
    killed_at = step_of(run)
    assert killed_at < 2 * STEPS, "the test was too late to interrupt"
    assert read_status(run)["status"] == "running", "lost, not fatal"
    assert latest_checkpoint(run) is not None

    again = cqwen("launch", config, "--ranks", 2)
    assert (again.returncode, again.stderr) == (0, "")
    assert f"step-{killed_at:08d}" in "".join(again.stdout.split())
    status = read_status(run)
    assert (status["status"], status["restarts"], status["step"]) == ("done", 2, 2 * STEPS)

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


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGTERM, 0), (signal.SIGINT, 2), (signal.SIGUSR1, 2)])
@pytest.mark.slow
def test_a_signal_to_the_launcher_alone_leaves_no_process(config, launch, number, ranks) -> None:
    """SIGTERM and SIGUSR1 as a batch system sends them, SIGINT as Ctrl-C does; also before a rank is there to hear."""
    run = config.parent / f"{number.name}-{ranks}"
    launched = launch(config, f"run.dir={run}", "stages.0.steps=1000000")
    if not ranks:
        wait_for("the launcher", launched.family)
    family = launched.at_work(run) if ranks else launched.family()
    launched.process.send_signal(number)
    launched.ends(family, 75)
    assert read_status(run)["status"] in ("preempted", "unknown")
    assert "stopping the ranks" in launched.log.read_text()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_run_at_once(config: Path, launch: Callable[..., Launched]) -> None:
    run = config.parent / "twice"
    launched = launch(config, f"run.dir={run}", "stages.0.steps=1000000")
    wait_for("steps", lambda: read_status(run).get("step", 0) >= 4)
    family = launched.family()
    for process in family:
        if "train" in process.cmdline():
            process.suspend()  # ranks that will not hear of it
    launched.process.send_signal(signal.SIGINT)
    wait_for("an answer to the first", lambda: "stopping the ranks" in launched.log.read_text())
    launched.process.send_signal(signal.SIGINT)
    launched.ends(family, 1)
