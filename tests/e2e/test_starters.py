"""`cqwen train` under every starter of ranks: the weights of two ranks are the same, whoever starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import command_environment, weights

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
