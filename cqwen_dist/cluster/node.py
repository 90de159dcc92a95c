"""A SLURM node: srun starts this task on it, and the task becomes DeepSpeed's launcher for the node's ranks."""

import argparse
import os
import signal
import sys

from cqwen_dist.cluster.rank import MODULE, Order, rank_environment, ranks_of_a_node


def main() -> None:
    """Reads CQWEN_HOSTS, MASTER_ADDR, MASTER_PORT (set by the job) and SLURM_NODEID (set by the task)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--logs", required=True)
    parser.add_argument("words", nargs="+")
    given = parser.parse_args()
    # SLURM signals every process in a job step. SIGUSR1 would end the launcher. After SIGTERM the launcher would kill
    # ranks that are still saving after 30 s. So it starts with both blocked, and only the ranks handle them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    order = Order("slurm", ["train", *given.words], os.getcwd(), logs=given.logs)
    command = ranks_of_a_node(os.environ["CQWEN_HOSTS"].split(), given.ranks)
    command += [f"--node_rank={os.environ['SLURM_NODEID']}", f"--master_addr={os.environ['MASTER_ADDR']}"]
    command += [f"--master_port={os.environ['MASTER_PORT']}", "--no_local_rank", "--module", MODULE, order.encode()]
    os.execve(sys.executable, command, {**os.environ, **rank_environment(given.ranks)})


if __name__ == "__main__":
    main()
