"""One node of a SLURM job: the task that srun starts there becomes DeepSpeed's launcher of the node's ranks."""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import sys
from pathlib import Path

from cqwen_dist.cluster.rank import MODULE, Order


def local_slots(ranks: int) -> list[int]:
    """The GPUs that SLURM gave to this task, if there is one for each rank; else 0, 1, ..."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [int(n) for n in given] if len(given) == ranks and all(map(str.isdecimal, given)) else list(range(ranks))


def has_gpu() -> bool:
    """Whether an NVIDIA driver is installed, without importing torch."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()


def rank_environment(ranks: int, cpus: int | None) -> dict[str, str]:
    """Variables that ranks on a node need and the user did not set."""
    wanted = {"OMP_NUM_THREADS": str(max(1, (cpus or 1) // ranks))}
    if not has_gpu():
        wanted["DS_ACCELERATOR"] = "cpu"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def main() -> None:
    """Reads CQWEN_HOSTS, MASTER_ADDR, MASTER_PORT (of the job) and SLURM_NODEID (of the task)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--logs", required=True)
    parser.add_argument("words", nargs="+")
    given = parser.parse_args()
    # SLURM signals every process of a step. SIGUSR1 would end the launcher; on SIGTERM it would end ranks that still
    # save after 30 s. So it starts with both blocked, and only the ranks handle them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    cpus = int(os.environ.get("SLURM_CPUS_ON_NODE", "0")) or os.cpu_count()
    order = Order("slurm", ["train", *given.words], os.getcwd(), rank_environment(given.ranks, cpus), logs=given.logs)
    command = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", "--quiet"]
    # Hosts and the numbers of their GPUs, a rank each, as DeepSpeed's launcher reads them.
    slots = {host: local_slots(given.ranks) for host in os.environ["CQWEN_HOSTS"].split()}
    command += [f"--world_info={base64.urlsafe_b64encode(json.dumps(slots).encode()).decode()}"]
    command += [f"--node_rank={os.environ['SLURM_NODEID']}", f"--master_addr={os.environ['MASTER_ADDR']}"]
    command += [f"--master_port={os.environ['MASTER_PORT']}", "--no_local_rank", "--module", MODULE, order.encode()]
    os.execve(sys.executable, command, {**os.environ, **order.environment})


if __name__ == "__main__":
    main()
