"""One rank, started by a launcher. It gets its order as one word and writes its ending to a file.

Remote shells interpret arguments. So a rank gets everything (command, folder, environment, log folder) as
base64-encoded JSON, which has no special characters.
"""

import base64
import json
import os
import platform
import runpy
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODULE = "cqwen_dist.cluster.rank"
_READ = "CQWEN_ENVIRONMENT_READ"


@dataclass(frozen=True)
class Order:
    """Instructions for a rank."""

    token: str  # identifies the launch; the first field, so that the encoded word starts with it
    words: list[str]  # arguments for `cqwen`
    folder: str
    environment_file: str | None = None  # a file, because other users can read command lines
    logs: str | None = None  # folder with an output file per rank; None: console

    def encode(self) -> str:
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode().rstrip("=")

    @staticmethod
    def decode(word: str) -> "Order":
        return Order(**json.loads(base64.urlsafe_b64decode(word + "=" * (-len(word) % 4))))


def has_gpu() -> bool:
    """Whether an NVIDIA driver is installed, without importing torch."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()


def rank_environment(ranks: int) -> dict[str, str]:
    """Environment variables that `ranks` ranks on this node need and the user did not set."""
    cpus = min(len(os.sched_getaffinity(0)), int(os.environ.get("SLURM_CPUS_ON_NODE") or sys.maxsize))
    wanted = {"OMP_NUM_THREADS": str(max(1, cpus // ranks))}
    if not has_gpu():
        wanted["DS_ACCELERATOR"] = "cpu"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def ranks_of_a_node(hosts: list[str], ranks: int) -> list[str]:
    """The start of the command line of DeepSpeed's launcher for one of these hosts.

    The launcher writes the GPUs that it is told into CUDA_VISIBLE_DEVICES. So it is told those of this process's own
    variable, as they are (numbers, or ids of GPUs and MIG slices); further ranks get no GPU, -1.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [*map(str, range(ranks))] if given is None else [each.strip() for each in given.split(",") if each.strip()]
    slots = dict.fromkeys(hosts, [*gpus, *["-1"] * ranks][:ranks])
    world = base64.urlsafe_b64encode(json.dumps(slots).encode()).decode()
    return [sys.executable, "-u", "-m", "deepspeed.launcher.launch", "--quiet", f"--world_info={world}"]


def main() -> None:
    """Become the rank that the order describes. Never returns."""
    # A stop request waits until the trainer handles it, instead of killing a process that is still importing.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    order = Order.decode(sys.argv[1])
    if order.environment_file is not None and os.environ.get(_READ) != order.token:
        os.environ.pop("DS_ACCELERATOR", None)  # set for the launcher; this host may have GPUs
        os.environ |= json.loads(Path(order.environment_file).read_text(encoding="utf-8"))
        os.environ |= {_READ: order.token, **rank_environment(int(os.environ["LOCAL_SIZE"]))}
        # Restart the process: the dynamic loader and Python read their variables only at startup.
        os.execv(sys.executable, [sys.executable, "-u", "-m", MODULE, sys.argv[1]])
    os.chdir(order.folder)
    rank = os.environ["RANK"]
    if order.logs is not None:
        Path(order.logs).mkdir(parents=True, exist_ok=True)
        log = os.open(Path(order.logs) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number in (1, 2):
            os.dup2(log, number)
    sys.argv = ["cqwen", *order.words]
    try:
        runpy.run_module("cqwen_dist", run_name="__main__", alter_sys=True)  # as `python -m cqwen_dist` does
        ending: dict[str, Any] = {"how": "ended"}
    except SystemExit as left:
        code = left.code or 0
        how = {0: "ended", 2: "wrong input", 74: "may pass"}.get(int(code) if str(code).isdigit() else 1, "failed")
        ending = {"how": how, "message": f"exit code {left.code}"}
        raise
    except BaseException as error:
        from cqwen_dist.parallel.collectives import cause_of

        how = "may pass" if cause_of(error).passing else "failed"
        ending = {"how": how, "message": f"{type(error).__name__}: {error}"}
        raise
    finally:
        if order.logs is not None:
            ending = {"rank": int(rank), "host": platform.node(), "time": time.time(), **ending}
            (Path(order.logs) / f"rank-{rank}.ended").write_text(json.dumps(ending), encoding="utf-8")


if __name__ == "__main__":
    main()
