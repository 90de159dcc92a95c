"""The keys that shape a model: what they make, and how many parameters the planner counts for the number head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.runs import write_config
from support.tiny import HIDDEN, tiny_model
from torch import nn

from cqwen_dist.config import load_config
from cqwen_dist.config.shape import NUMBER_KEYS, SHAPE_KEYS
from cqwen_dist.training.parameter_groups import head_members


@pytest.mark.parametrize(
    "keys",
    [{}, {"model__copies": 3}, {"start": "seed"}],
    ids=["plain", "copies", "without number dimensions"],
)
def test_the_planner_counts_the_number_heads_parameters(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = load_config(write_config(tmp_path, **keys))
    model = tiny_model(**config.model_shape())
    own = [m.parameter.numel() for m in head_members(nn.ModuleDict(model.heads)) if m.group == "regression"]
    assert sum(own) == config.number_parameters(HIDDEN, HIDDEN + config.number_dims)


def test_every_shape_key_is_a_key_of_the_config_and_a_field_of_the_model(tmp_path: Path) -> None:
    config, shape = load_config(write_config(tmp_path)), tiny_model().config
    assert set(config.model_shape()) - {"word_terms"} == set(SHAPE_KEYS) >= set(NUMBER_KEYS), "these shape no tensor"
    for field in SHAPE_KEYS:
        assert hasattr(shape, field), field
