"""From 1 to 1,024 GPUs on paper: every rank keeps its micro-batches, the global batch grows with the ranks.

Efficiency is tokens/s a GPU against the one GPU of the same micro-batch (or the fewest that hold the model). The bytes
behind it are `plan.comm`'s, which tests count on 1, 2 and 4 ranks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cqwen_dist.config import Config
from cqwen_dist.plan.machine import Machine
from cqwen_dist.plan.make import Plan, plan

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
NODE = 8
# ZeRO stage, vocabulary group (the node's ranks at most; 64: several nodes)
LAYOUTS = ((1, 1), (1, NODE), (3, 1), (3, NODE), (3, 64))


@dataclass(frozen=True)
class Point:
    """One number of ranks in one layout."""

    ranks: int
    zero_stage: int
    vocab_group_size: int
    tokens_per_s: float
    efficiency: float
    communication: float  # share of the step
    device_gib: float
    fits: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def scaling(
    config: Config,
    *,
    gpu_memory_gib: float,
    architecture: dict[str, Any],
    machine: Machine | None = None,
    accumulation: int = 1,
) -> list[Point]:
    """Every layout at every number of ranks; 8 to a node. Raises `UserError` as `plan` does."""
    options: dict[str, Any] = {"gpu_memory_gib": gpu_memory_gib, "architecture": architecture, "machine": machine}
    alone = _planned(config, 1, 1, 1, accumulation, options).slowest.tokens_per_s
    found = []
    for zero, group in LAYOUTS:
        for ranks in RANKS:
            if group > NODE and ranks < group:
                continue
            size = min(group, ranks)
            planned = _planned(config, ranks, zero, size, accumulation, options)
            slowest = planned.slowest
            found.append(
                Point(
                    ranks=ranks,
                    zero_stage=zero,
                    vocab_group_size=size,
                    tokens_per_s=slowest.tokens_per_s,
                    efficiency=slowest.tokens_per_s / ranks / alone,
                    communication=slowest.time.communication / slowest.time.seconds,
                    device_gib=planned.device_gib,
                    fits=planned.fits,
                )
            )
    return found


def _planned(config: Config, ranks: int, zero: int, group: int, accumulation: int, options: dict[str, Any]) -> Plan:
    """With this layout, in which every rank keeps its micro-batches."""
    batch = config.train.micro_batch_size * accumulation * ranks
    grown = config.model_copy(
        update={
            "train": config.train.model_copy(update={"global_batch_size": batch}),
            "parallel": config.parallel.model_copy(update={"zero_stage": zero, "vocab_group_size": group}),
            "stages": [
                stage.model_copy(update={"global_batch_size": None, "micro_batch_size": None})
                for stage in config.stages
            ],
        }
    )
    return plan(grown, nodes=max(1, ranks // NODE), gpus_per_node=min(ranks, NODE), **options)
