"""Many micro-batches in bf16: their gradients add up in fp32."""

import pytest
import torch
from support.ranks import run_ranks
from test_step_waits import rig_of

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


def test_many_micro_batches_in_bf16_add_up_in_fp32() -> None:
    """Up to a rounding. Added up in bf16, where one below 1/512 of the sum is lost, they would be off by 7 %."""
    for whole, each in run_ranks(both_ways, 2):
        assert float(each.norm()) > 0
        assert float((whole - each).norm() / each.norm()) < 2**-8
        assert float(whole.norm() / each.norm()) == pytest.approx(1.0, abs=1e-3)
