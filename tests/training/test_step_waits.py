"""In a step the host waits for the device at most twice.

Counted on a CPU by `benchmarks.launches`, as if the batches were on the host and all else on a device.
"""

from collections import Counter
from typing import Any

import pytest
from support.ranks import Pool
from support.runs import as_rank, qwen2_sizes

from benchmarks.launches import counting
from benchmarks.rig import Rig, build_rig
from cqwen_dist.config import Config

SIZES = qwen2_sizes(120, 16, 24, 2, 1, tie_word_embeddings=True)
CASES = [(zero, precision, pack) for zero in (1, 2, 3) for precision, pack in (("fp32", True), ("bf16", False))]


def rig_of(zero: int, precision: str, pack: bool = False, accumulation: int = 1, **more: Any) -> Rig:
    """Of two stages: heads, all. more: sections of the config, and keys of `model`."""
    runtime = as_rank()
    config = Config.model_validate(
        {
            "model": {"architecture": SIZES, **more.pop("model", {})},
            "data": {"train": "unused", "sequence_length": 8, "pack": pack},
            "stages": [
                {"name": "heads", "train": ["heads"], "steps": 9},
                {"name": "all", "train": ["heads", "embedding", "lora"], "steps": 9},
            ],
            "parallel": {"zero_stage": zero},
            "train": {
                "micro_batch_size": 2,
                "global_batch_size": 2 * accumulation * runtime.world_size,
                "precision": precision,
                "max_grad_norm": 1e-3,
            },
            **more,
        }
    )
    return build_rig(config, SIZES, runtime)


def waits(zero: int, precision: str, pack: bool, accumulation: int) -> dict[str, Counter[str]]:
    """Where a step of each stage waits."""
    found: dict[str, Counter[str]] = {}
    rig = rig_of(zero, precision, pack, accumulation=accumulation)
    for stage in (0, 1):
        plan = rig.enter(stage)
        batches = rig.batches(plan)
        for _ in range(3):  # ZeRO-3 records its order of modules; the throughput timer would start
            rig.step(batches, plan)
        with counting(t for batch in batches for t in batch.tensors()) as launches:
            rig.step(batches, plan)
            launches.end("step")
        found[plan.stage.name] = launches.waits["step"]
    return found


@pytest.mark.parametrize(
    ("world", "accumulation", "most", "zero", "precision", "pack"),
    [
        pytest.param(*sizes, *case, id=f"{sizes[0]} ranks, ZeRO {case[0]}, {case[1]}")
        for sizes, cases in (((1, 2, 1), CASES[1::2]), ((2, 1, 2), CASES[::2]))
        for case in cases
    ],
)
def test_a_step_waits_only_for_the_norm_and_the_counts(
    pool: Pool, world: int, accumulation: int, most: int, zero: int, precision: str, pack: bool
) -> None:
    for found in pool(waits, world, zero, precision, pack, accumulation):
        for stage, places in found.items():
            assert sum(places.values()) <= most, f"{stage}: {dict(places)}"
            assert any("_finite_norm" in place for place in places), f"{stage}: a NaN would go unnoticed"
