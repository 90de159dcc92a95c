"""Weak scaling from 1 to 1,024 GPUs, computed: every rank keeps its micro-batch, the global batch grows with the ranks.

Efficiency is tokens/s a GPU over those of one GPU with the same micro-batch. The bytes come from `plan.comm`; tests
compare them with those of 1, 2 and 4 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from cqwen_dist.config import Config
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


def scaling(config: Config, **options: Any) -> list[Point]:
    """Every layout at every number of ranks; 8 to a node.

    options: those of `plan` but for nodes and GPUs. Raises `UserError` as `plan` does.
    """
    alone = _planned(config, 1, 1, 1, options).slowest.tokens_per_s
    found = []
    for (zero, group), ranks in product(LAYOUTS, RANKS):
        if group > NODE and ranks < group:
            continue
        size = min(group, ranks)
        planned = _planned(config, ranks, zero, size, options)
        slowest = planned.slowest
        point = Point(
            ranks=ranks,
            zero_stage=zero,
            vocab_group_size=size,
            tokens_per_s=slowest.tokens_per_s,
            efficiency=slowest.tokens_per_s / ranks / alone,
            communication=slowest.time.communication / slowest.time.seconds,
            device_gib=planned.device_gib,
            fits=planned.fits,
        )
        found.append(point)
    return found


def _planned(config: Config, ranks: int, zero: int, group: int, options: dict[str, Any]) -> Plan:
    """With this layout, in which every rank keeps its micro-batch, once a step."""
    batch = config.train.micro_batch_size * ranks
    own = {"global_batch_size": None, "micro_batch_size": None}
    grown = config.model_copy(
        update={
            "train": config.train.model_copy(update={"global_batch_size": batch}),
            "parallel": config.parallel.model_copy(update={"zero_stage": zero, "vocab_group_size": group}),
            "stages": [stage.model_copy(update=own) for stage in config.stages],
        }
    )
    return plan(grown, nodes=max(1, ranks // NODE), gpus_per_node=min(ranks, NODE), **options)
