"""In a step the host waits for the device at most twice.

Counted on a CPU by `benchmarks.launches`, as if the batches were on the host and all else on a device.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
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
def test_a_step_waits_only_for_the_norm_and_the_counts(pool, world, accumulation, most, zero, precision, pack) -> None:
    for found in pool(waits, world, zero, precision, pack, accumulation):
        for stage, places in found.items():
            assert sum(places.values()) <= most, f"{stage}: {dict(places)}"
            assert any("_finite_norm" in place for place in places), f"{stage}: a NaN would go unnoticed"


def launched() -> tuple[Counter[str], int]:
    """The operations of a clipped step that trains all, and the tensors of the heads that it steps."""
    rig = rig_of(1, "bf16")
    plan = rig.enter(1)
    batches = rig.batches(plan)
    rig.step(batches, plan)
    with counting(t for batch in batches for t in batch.tensors()) as launches:
        rig.step(batches, plan)
        launches.end("step")
    assert rig.engine.clipped
    return launches.operations["step"], sum(m.parameter.requires_grad for m in rig.engine.heads.members)


def test_clipping_and_adam_are_few_launches(pool) -> None:
    """One for each tensor of the heads, as groups have rates of their own, and for each of the engine's two groups."""
    ((operations, tensors),) = pool(launched, 1)
    assert tensors == 9
    assert operations["_fused_adamw_"] == tensors + 2
    assert operations["_foreach_add_"] == 2, "Adam's count of the engine's groups"
    assert operations["_foreach_mul_"] == 2, "the heads' gradients, and the engine's"


MICRO_BATCHES = 150


def both_ways() -> list[torch.Tensor]:
    return [gradients_in_bf16(one_step) for one_step in (True, False)]


def gradients_in_bf16(one_step: bool) -> torch.Tensor:
    """This rank's part of the features' gradients of 150 micro-batches under ZeRO-1, fp32.

    one_step: as one step takes them; else each is reduced by itself, and the results are added up in fp32.
    """
    rig = rig_of(1, "bf16")
    plan = rig.enter(1)
    engine, batch = rig.engine, rig.batches(plan)[0]
    keep = torch.arange(batch.labels.numel())
    direction = torch.randn(len(keep), 16, generator=torch.Generator().manual_seed(3))
    for i in range(MICRO_BATCHES):
        z = engine.forward(batch, keep)
        engine.backward((z.float() * direction).sum() * (1 + i / 350), not one_step or i == MICRO_BATCHES - 1)
    assert engine.flat is not None
    return torch.cat(list(engine.flat.parts.values()))


@pytest.mark.slow
def test_many_micro_batches_in_bf16_add_up_in_fp32() -> None:
    """Up to a rounding. Added up in bf16, where one below 1/512 of the sum is lost, they would be off by 7 %."""
    for whole, each in run_ranks(both_ways, 2):
        assert float(each.norm()) > 0
        assert float((whole - each).norm() / each.norm()) < 2**-8
        assert float(whole.norm() / each.norm()) == pytest.approx(1.0, abs=1e-3)


def compare(precision: str, zero: int) -> dict[str, Any]:
    rig = rig_of(zero, precision)
    plan = rig.enter(1)
    rig.step(rig.batches(plan), plan)
    optimizer = rig.engine.engine.optimizer
    found: dict[str, Any] = {"norms": []}
    flat = optimizer.step.__self__
    coefficient, step = flat.coefficient, optimizer.step

    def both() -> None:
        masters = [optimizer.single_partition_of_fp32_groups[i] for i in flat.parts]
        own = type(optimizer).get_grad_norm_direct(optimizer, list(flat.parts.values()), masters)
        found["norms"].append(float(own))
        step()

    def looked(norm_sq: torch.Tensor) -> float:
        found["norms"].append(float(norm_sq.sqrt()))
        return coefficient(norm_sq)

    optimizer.step, flat.coefficient = both, looked
    before = [m.parameter.detach().clone() for m in rig.engine.feature_members]
    rig.step(rig.batches(plan, 1), plan)
    after = [m.parameter.detach().clone() for m in rig.engine.feature_members]
    for index in range(len(optimizer.bit16_groups)):  # DeepSpeed's own way to the same weights
        type(optimizer)._update_model_bit16_weights(optimizer, index)
    again = [m.parameter.detach() for m in rig.engine.feature_members]
    found["moved"] = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    found["same"] = all(torch.equal(a, b) for a, b in zip(after, again, strict=True))
    return found


@pytest.mark.parametrize(("precision", "zero"), [("fp32", 1), ("bf16", 2)])
def test_the_flat_steps_norms_and_weights_equal_deepspeeds(precision: str, zero: int) -> None:
    for found in run_ranks(compare, 2, precision, zero):
        own, quick = found["norms"]
        assert quick == pytest.approx(own, rel=1e-5)  # a sum of some thousand squares each, in other orders
        assert found["moved"] > 0
        assert found["same"]


def gathered_frozen_weights() -> tuple[int, int]:
    """(elements of frozen parameters that are still whole after a step, elements of all frozen ones) under ZeRO-3."""
    whole = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    rig = rig_of(3, "fp32", model={"gradient_checkpointing": True}, deepspeed=whole)
    plan = rig.enter(1)
    rig.step(rig.batches(plan), plan)
    frozen = [p for p in rig.engine.engine.module.parameters() if not p.requires_grad and hasattr(p, "ds_status")]
    whole = sum(p.ds_numel for p in frozen if p.ds_status.name == "AVAILABLE")
    return whole, sum(p.ds_numel for p in frozen)


def test_under_zero_3_with_checkpointed_layers_no_frozen_weight_stays_gathered() -> None:
    """Versions of DeepSpeed before 0.19.3 keep all of them, so the largest bases run out of memory."""
    for whole, frozen in run_ranks(gathered_frozen_weights, 2):
        assert whole == 0
        assert frozen > 1000
