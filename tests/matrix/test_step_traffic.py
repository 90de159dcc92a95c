"""All that ranks say in a step, DeepSpeed's features among it, is `plan.comm.step_messages` of the config, exactly."""

import time
from collections import Counter
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from support.devices import LINKS
from support.runs import as_rank, qwen2_sizes

from benchmarks.traffic import Traffic
from cqwen_dist.config import Config
from cqwen_dist.sizes.architecture import Architecture
from cqwen_dist.tools.plan.comm import step_messages
from cqwen_dist.tools.plan.stage_sizes import stage_sizes

SIZES = qwen2_sizes(212, 64, 96, 4, 4, tie_word_embeddings=True)
# Everything may stay gathered; nothing may.
WINDOW = {"stage3_param_persistence_threshold": 0}
NARROW = {**WINDOW, "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 1, "stage3_prefetch_bucket_size": 0}
OPERATIONS = {
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
}
WATCHING = ExitStack()
TINY = 64  # bytes for each rank: the counts of a step, norms, flags; every other message of these cases is larger


def config_of(
    zero: int, group: int, precision: str, accumulation: int, world: int, extra: dict[str, Any], sequence: int
) -> Config:
    return Config.model_validate(
        {
            "model": {"architecture": SIZES, "attention": "varlen", "gradient_checkpointing": sequence == 4},
            "data": {"train": "unused", "sequence_length": 16},
            "stages": [{"name": "all", "train": ["heads", "embedding", "lora"], "steps": 10}],
            "parallel": {"zero_stage": zero, "vocab_group_size": group, "sequence_group_size": sequence},
            "train": {
                "micro_batch_size": 2,
                "global_batch_size": 2 * accumulation * world // sequence,
                "precision": precision,
            },
            "deepspeed": {"zero_optimization": extra} if extra else {},
        }
    )


@cache
def traffic() -> Traffic:
    """Of this rank, from its first case on: DeepSpeed keeps the functions that it finds first."""
    traffic = Traffic(time.perf_counter)
    WATCHING.enter_context(traffic.watching())
    return traffic


def counted_and_planned(
    zero: int, group: int, precision: str, accumulation: int, extra: dict[str, Any], sequence: int
) -> tuple[Counter[Any], Counter[Any]]:
    """Bytes by operation and group."""
    from benchmarks.rig import build_rig

    runtime, watched = as_rank(), traffic()

    config = config_of(zero, group, precision, accumulation, runtime.world_size, extra, sequence)
    rig = build_rig(config, SIZES, runtime)
    plan = rig.enter(0)
    batches = rig.batches(plan)
    rig.step(batches, plan)
    rig.step(batches, plan)
    watched.on = True
    rig.step(batches, plan)
    watched.on = False
    counted: Counter[Any] = Counter()
    tiny = TINY * runtime.world_size
    for operation, name, ranks, size in watched.take()[0]:
        if size > tiny and ranks > 1:
            counted[OPERATIONS[operation], name if name in ("vocabulary", "replica", "sequence") else "world"] += size
    (s,) = stage_sizes(config, Architecture.of(SIZES), world=runtime.world_size, kind=runtime.device.type)
    planned: Counter[Any] = Counter()
    for message in step_messages(s):
        if message.bytes > tiny:
            planned[message.operation, message.group] += message.bytes
    return counted, planned


def case(
    world: int, zero: int, group: int, precision: str, accumulation: int, extra: dict[str, Any], sequence: int = 1
) -> Any:
    window = "" if not extra else ", all may stay gathered" if extra is WINDOW else ", nothing may stay gathered"
    name = f"{world} ranks, ZeRO {zero}, groups of {group}, {precision}, {accumulation} micro-batches{window}"
    name += f", texts over {sequence}" * (sequence > 1)
    marks = pytest.mark.slow if world == 4 else ()
    return pytest.param(world, zero, group, precision, accumulation, extra, sequence, id=name, marks=marks)


CASES = [
    case(2, 1, 2, "fp32", 2, {}),
    case(2, 2, 1, "bf16", 2, {}),
    case(2, 3, 2, "fp32", 2, WINDOW),
    case(2, 3, 1, "fp32", 1, NARROW),
    case(2, 2, 2, "fp32", 2, {}, 2),
    case(4, 1, 1, "bf16", 1, {}, 4),
    case(4, 2, 2, "fp32", 2, {}),
]


NAMES = ("world", "zero", "group", "precision", "accumulation", "extra", "sequence")


@pytest.mark.parametrize(NAMES, CASES)
def test_counted_bytes_equal_the_plan(pool, world, zero, group, precision, accumulation, extra, sequence) -> None:
    for counted, planned in pool(counted_and_planned, world, zero, group, precision, accumulation, extra, sequence):
        assert counted == planned


@LINKS
@pytest.mark.parametrize(NAMES, [each for each in CASES if each.values[0] == 2])
def test_counted_bytes_of_gpus_equal_the_plan(
    pool, world, zero, group, precision, accumulation, extra, sequence, link
) -> None:
    """There gradients of rows are scattered, not all-reduced."""
    case = zero, group, precision, accumulation, extra, sequence
    for counted, planned in pool(counted_and_planned, world, *case, link=link):
        assert counted == planned


def test_one_rank_sends_no_messages() -> None:
    (s,) = stage_sizes(config_of(3, 1, "bf16", 1, 1, {}, 1), Architecture.of(SIZES), world=1, kind="cpu")
    assert step_messages(s) == []
