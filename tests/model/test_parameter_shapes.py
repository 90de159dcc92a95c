"""No parameter has 0 dimensions: DeepSpeed cannot flatten one."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny import NUM, VOCAB, tiny_causal_lm

import cqwen_dist.auto  # noqa: F401  registers
from cqwen_dist.heads.seed_losses import CausalQwenLoss

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scalar C": {"scalar_threshold": True},
    "several values": {"more_values": 1},
    "types": {"number_types": 2},
    "copies": {"copies": 2},
    "wide, two layers": {"wide": 64, "random_features": 8, "number_dims": 2, "abduction": "two_layer"},
    "periods, adapters": {
        "value_periods": [10.0],
        "lora": {"r": 2, "alpha": 4, "dropout": 0.0, "target_modules": ["q_proj"], "dora": True},
    },
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_every_parameter_has_a_dimension(shape: dict[str, Any]) -> None:
    model = tiny_causal_lm(**shape)
    assert [name for name, p in model.named_parameters() if p.ndim == 0] == []
    assert [name for name, p in CausalQwenLoss(VOCAB, NUM).named_parameters() if p.ndim == 0] == []
