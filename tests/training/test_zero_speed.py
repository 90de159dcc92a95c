"""The step over flat buffers has the norm and the weights that DeepSpeed's own code has."""

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from test_step_waits import rig_of


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
