"""`cqwen train` under every starter of ranks: the weights of two ranks are the same, whoever starts them."""

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.runs import command_environment, cqwen_forked, end_of, wait_for, weights, write_config

from cqwen_dist.parallel.launcher import free_port

BIN = Path(sys.executable).parent
LAUNCH = Path(__file__).parents[2] / "launch"
TRAIN = ["-m", "cqwen_dist", "train"]


def command_line(name: str, *words: object) -> list[object]:
    """The line that starts two ranks. words: a config and its overrides."""
    config, *changes = words
    known: dict[str, list[object]] = {
        "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", 2, *TRAIN, *words],
        "cqwen launch": [sys.executable, "-m", "cqwen_dist", "launch", "--ranks", 2, *words],
        "launch/local.sh": [LAUNCH / "local.sh", config, 2, *changes],
        "launch/train.py": [BIN / "deepspeed", "--num_accelerators", 2, LAUNCH / "train.py", *words],
        "launch/accelerate.yaml": [
            *(BIN / "accelerate", "launch", "--config_file", LAUNCH / "accelerate.yaml", "--main_process_port", 0),
            *(*TRAIN, *words),
        ],
    }
    return known[name]


def ended(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        out, _ = process.communicate()
        assert process.returncode == 0, out


PATH = os.pathsep.join([str(BIN), os.environ["PATH"]])  # scripts look for `deepspeed` there


def begun(command: list[object], **environment: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(list(map(str, command)), env={**command_environment(**environment), "PATH": PATH}, **pipes)  # type: ignore[call-overload, no-any-return]


STARTERS = ("torchrun", "cqwen launch", "launch/local.sh", "launch/train.py", "launch/accelerate.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTERS)
def test_every_launcher_gives_the_same_weights(name: str, two_ranks: Path, tmp_path: Path) -> None:
    changes = f"run.dir={tmp_path / 'run'}", "stages.0.lr=1e-2"  # its rate; YAML alone would read a text
    ended(begun(command_line(name, two_ranks.parent / "config.yaml", *changes)))
    assert weights(tmp_path / "run") == weights(two_ranks)


MEETING = """
import os
import torch
from cqwen_dist.parallel.collectives import sum_over
from cqwen_dist.parallel.runtime import distributed

with distributed(60):
    met = int(sum_over(torch.ones(1)).item())
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(1)
    print(f"{met} met again", flush=True)
"""


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_meet(tmp_path: Path) -> None:
    """Its store has the addresses of the ranks that died."""
    (script := tmp_path / "meeting.py").write_text(MEETING)
    restarts = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 1, "--monitor-interval", 0.1]
    process = begun([BIN / "torchrun", *restarts, script], PYTHONPATH=str(LAUNCH.parent))
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert out.count("2 met again") == 2


@pytest.mark.slow
def test_two_hosts_without_ssh_give_the_same_weights(two_ranks: Path, tmp_path: Path) -> None:
    """launch/nodes.sh is called on each host. Both hosts are this machine here."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    words = [two_ranks.parent / "config.yaml", hostfile]
    port, change = str(free_port()), f"run.dir={tmp_path / 'run'}"
    hosts = [begun([LAUNCH / "nodes.sh", *words, rank, "127.0.0.1", change], MASTER_PORT=port) for rank in range(2)]
    ended(*hosts)
    assert weights(tmp_path / "run") == weights(two_ranks)


LONG = [{"name": "heads", "train": ["heads", "embedding"], "steps": 100_000, "lr": 1e-3}]


def status(run: Path) -> dict[str, object]:
    try:
        return dict(json.loads((run / "status.json").read_text()))
    except (OSError, ValueError):
        return {}


def started(
    command: list[object], run: Path, terminal: int | None = None, **options: object
) -> subprocess.Popen[bytes]:
    """At its first steps. terminal: the side of it that somebody reads until then; a full one would hold the run up."""
    words = [sys.executable, "-m", "cqwen_dist", *map(str, command)]
    process = subprocess.Popen(words, env=command_environment(), start_new_session=True, **options)  # type: ignore[call-overload]

    def has_begun() -> bool:
        assert process.poll() is None, "it ended before it began"
        if terminal is not None:
            with suppress(BlockingIOError):
                os.read(terminal, 1 << 16)
        return bool(status(run).get("step"))

    wait_for("a step", has_begun)
    return process


def at_work(run: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [process] if str(run.parent / "config.yaml") in process.cmdline() else []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("blow", ["the terminal closes", "kill -9"])
def test_ranks_stop_cleanly_when_their_launcher_dies(tmp_path: Path, blow: str) -> None:
    config = write_config(tmp_path, stages=LONG, train__checkpoint_every=50_000)
    run = tmp_path / "run"
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    try:
        process = started(["launch", config, "--ranks", 2], run, ours, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        assert len(at_work(run)) >= 4, "launcher, DeepSpeed's two, ranks"
        if blow == "kill -9":
            process.kill()
        else:
            os.close(ours)
            process.send_signal(signal.SIGHUP)  # the kernel's part, where it is the controlling terminal
        end_of(process)
        wait_for("the end of all", lambda: not at_work(run))
    finally:
        for left in at_work(run):
            with suppress(psutil.NoSuchProcess):
                left.kill()
    assert {"status": "preempted"}.items() <= status(run).items(), "steps were lost"
    assert status(run)["checkpoint"] == f"step-{status(run)['step']:08d}"


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_does_not_stop_the_run(tmp_path: Path) -> None:
    config = write_config(tmp_path, stages=[{**LONG[0], "steps": 300}], train__checkpoint_every=200)
    run = tmp_path / "run"
    ignoring = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    reading, writing = os.pipe()
    os.close(reading)
    process = started(["train", config], run, stdout=writing, stderr=writing, **ignoring)
    os.close(writing)
    process.send_signal(signal.SIGHUP)
    assert end_of(process) == 0
    assert status(run)["status"] == "done"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "cqwen_dist", "config", "schema"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, env=command_environment())
    said = "error: output: found No space left on device, allowed: a place that can be written\n"
    assert (done.returncode, done.stderr) == (2, said)
    assert cqwen_forked("config", "schema").returncode == 0
