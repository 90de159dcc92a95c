"""One node of a SLURM job: the task that srun starts there becomes DeepSpeed's launcher of the node's ranks."""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import sys

from cqwen_dist.cluster.rank import MODULE, Order, rank_environment


def local_slots(ranks: int) -> list[int]:
    """The first of the GPUs that SLURM gave to this task, if there is one for each rank; else 0, 1, ..."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[:ranks]
    return [int(n) for n in given] if len(given) == ranks and all(map(str.isdecimal, given)) else list(range(ranks))


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
    order = Order("slurm", ["train", *given.words], os.getcwd(), logs=given.logs)
    command = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", "--quiet"]
    # Hosts and the numbers of their GPUs, a rank each, as DeepSpeed's launcher reads them.
    slots = {host: local_slots(given.ranks) for host in os.environ["CQWEN_HOSTS"].split()}
    command += [f"--world_info={base64.urlsafe_b64encode(json.dumps(slots).encode()).decode()}"]
    command += [f"--node_rank={os.environ['SLURM_NODEID']}", f"--master_addr={os.environ['MASTER_ADDR']}"]
    command += [f"--master_port={os.environ['MASTER_PORT']}", "--no_local_rank", "--module", MODULE, order.encode()]
    os.execve(sys.executable, command, {**os.environ, **rank_environment(given.ranks)})


if __name__ == "__main__":
    main()
