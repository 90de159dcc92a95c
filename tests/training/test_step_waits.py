"""In a step the host waits for the device at most twice, and no Python of the optimizer runs for each adapter.

Counted on a CPU by `bench.launches`, as if the batches were on the host and all else on a device.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from support.ranks import Pool
from support.runs import as_rank

from benchmarks.launches import counting
from cqwen_dist.config import Config
from cqwen_dist.tools.site.rig import Rig, build_rig

SIZES: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 120,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
CASES = [(zero, precision, pack) for zero in (1, 2, 3) for precision, pack in (("fp32", True), ("bf16", False))]


def rig_of(zero: int, precision: str, pack: bool, layers: int = 2, accumulation: int = 1) -> Rig:
    runtime = as_rank()
    sizes = {**SIZES, "num_hidden_layers": layers}
    config = Config.model_validate(
        {
            "model": {"architecture": sizes},
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
        }
    )
    return build_rig(config, sizes, runtime)


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
        for sizes, cases in (((1, 2, 1), CASES), ((2, 1, 2), CASES[::2]))
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


def planted() -> list[str]:
    """Waits that are seen where they are planted."""
    device, mask = torch.ones(3), torch.ones(3, dtype=torch.bool)
    host = torch.arange(3)
    with counting([host]) as launches:
        float(device.sum())
        int(host.sum())
        device[mask]
        device.cpu().tolist()
        device.tolist()
        moved = host.to(torch.device("cpu"))
        int(moved.sum())
        int(host.to(torch.device("cpu"), non_blocking=True).max())
        torch.tensor([1.0], device=torch.device("cpu"))
        mask.nonzero()
        bool((device > 1).any())
        device.repeat_interleave(mask.long())
        launches.end("")
    return [place.split(" at ")[0] for place in launches.waits[""].elements()]


def test_the_counter_finds_planted_waits(pool: Pool) -> None:
    (seen,) = pool(planted, 1)
    assert Counter(seen) == {
        **{
            "_local_scalar_dense": 4,
            "index": 1,
            "repeat_interleave": 1,
            "cpu": 1,
            "tolist": 1,
            "to(device)": 1,
            "nonzero": 1,
        },
        "torch.tensor of Python numbers": 1,
    }


def calls_of_a_step(zero: int, layers: int) -> tuple[int, int]:
    """(Python calls, operations) of the engine's step, and of what ends backward, with so many layers."""
    rig = rig_of(zero, "bf16", False, layers)
    plan = rig.enter(1)
    batches = rig.batches(plan)
    calls, step = Counter[str](), rig.engine.step

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls["step"] += 1

    def watched() -> Any:
        sys.setprofile(watch)
        try:
            return step()
        finally:
            sys.setprofile(None)

    for _ in range(3):
        rig.step(batches, plan)
    rig.engine.step = watched  # type: ignore[method-assign]
    rig.step(batches, plan)
    rig.engine.step = step  # type: ignore[method-assign]
    with counting() as launches:

        def counted() -> Any:
            launches.end("before")
            norm = step()
            launches.end("step")
            return norm

        rig.engine.step = counted  # type: ignore[method-assign]
        rig.step(batches, plan)
    return calls["step"], sum(launches.operations["step"].values())


def few_and_many(zero: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return calls_of_a_step(zero, 2), calls_of_a_step(zero, 6)


@pytest.mark.parametrize("zero", [1, 2])
def test_the_steps_operations_do_not_grow_with_adapters(pool: Pool, zero: int) -> None:
    ((few, many),) = pool(few_and_many, 1, zero)
    assert few == many, "Python calls and operations of a step, with 28 tensors and with 84"
