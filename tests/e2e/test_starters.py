"""`cqwen train` under every starter of ranks: the weights of two ranks are the same, whoever starts them."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import command_environment

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.parallel.launcher import free_port
from cqwen_dist.run.files import file_record

BIN = Path(sys.executable).parent
TRAIN = ["-m", "cqwen_dist", "train"]
ONE_MACHINE = ["--num_machines", "1", "--num_processes", "2", "--mixed_precision", "no", "--dynamo_backend", "no"]


def starter(name: str) -> list[object]:
    """The words in front of a config; accelerate's --multi_gpu starts ranks without a GPU, too (its --cpu: one)."""
    known: dict[str, list[object]] = {
        "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", 2, *TRAIN],
        "cqwen launch": [sys.executable, "-m", "cqwen_dist", "launch", "--ranks", 2],
        "deepspeed": [
            *(BIN / "deepspeed", "--num_accelerators", 2, "--master_port", free_port(), "--module", *TRAIN[1:]),
        ],
        "accelerate": [BIN / "accelerate", "launch", "--multi_gpu", "--main_process_port", 0, *ONE_MACHINE, *TRAIN],
    }
    return known[name]


def weights(run: Path) -> dict[str, str]:
    """Digests of the last checkpoint's tensors, moments among them."""
    found = {path.name: file_record(path)["sha256"] for path in checkpoint_folder(run, 6).glob("*.safetensors")}
    assert len(found) >= 6
    return found


def ended(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        out, _ = process.communicate()
        assert process.returncode == 0, out[-3000:]


def begun(command: list[object], **environment: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(list(map(str, command)), env=command_environment(**environment), **pipes)  # type: ignore[call-overload, no-any-return]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("cqwen launch", "deepspeed", "accelerate")]


@pytest.mark.parametrize("name", ["torchrun", *SLOW])
def test_every_launcher_gives_the_same_weights(name: str, two_ranks: Path, tmp_path: Path) -> None:
    ended(begun([*starter(name), two_ranks.parent / "config.yaml", f"run.dir={tmp_path / 'run'}"]))
    assert weights(tmp_path / "run") == weights(two_ranks)


@pytest.mark.slow
def test_deepspeed_without_ssh_starts_the_same_run_on_two_hosts(two_ranks: Path, tmp_path: Path) -> None:
    """Its line is typed on each host. Both hosts are this machine here."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    command = [BIN / "deepspeed", "--hostfile", hostfile, "--no_ssh", "--master_addr", "127.0.0.1"]
    command += ["--master_port", free_port()]
    words = ["--module", *TRAIN[1:], two_ranks.parent / "config.yaml", f"run.dir={tmp_path / 'run'}"]
    ended(*(begun([*command, "--node_rank", host, *words]) for host in range(2)))
    assert weights(tmp_path / "run") == weights(two_ranks)


@pytest.mark.slow
def test_srun_variables_start_the_same_run(two_ranks: Path, tmp_path: Path) -> None:
    """Its variables, and MASTER_ADDR and MASTER_PORT, which its user sets. The real one: tests/cluster."""
    command = [sys.executable, *TRAIN, two_ranks.parent / "config.yaml", f"run.dir={tmp_path / 'run'}"]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_NTASKS": "2"}
    ended(*(begun(command, **place, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(2)))
    assert weights(tmp_path / "run") == weights(two_ranks)
