"""The plan's counts are those of the built model, for random draws of all that shapes it, on every base."""

import random
from typing import Any

import pytest
from support.tiny import tiny_base, tiny_model
from torch import nn

from cqwen_dist.config import Config
from cqwen_dist.config.architectures import ARCHITECTURES
from cqwen_dist.config.trainable import feature_counts
from cqwen_dist.sizes.architecture import Architecture
from cqwen_dist.tools.plan.make import plan
from cqwen_dist.training.parameter_groups import feature_members, head_members

DRAWS = 4  # of each base


def drawn(kind: str, tied: bool, draw: random.Random) -> Config:
    """A config of the tiny base; the values of a column are equally likely."""
    columns: dict[str, list[Any]] = {
        "causal_size": [None, 8, 30],
        "wide": [0, [64, 8, 2]],
        "candidates": ["none", "arithmetic"],
    }
    model = {key: draw.choice(values) for key, values in columns.items()}
    start = draw.choice(["calibrated", "seed"])
    model["wide"] = model["wide"] if start == "calibrated" else 0
    names = [*ARCHITECTURES[kind].linears]
    targets = draw.choice(["all-linear", None, draw.sample(names, 2)])
    kinds = {"dora": True}, {}
    lora: dict[str, Any] = {"r": draw.choice([1, 3, 16]), **draw.choice(kinds)}
    model["lora"] = lora if targets is None else {**lora, "target_modules": targets}
    trained = draw.choice([["heads"], ["heads", "embedding", "lora"], ["lora"], ["abduction", "embedding"]])
    return Config.model_validate(
        {
            "model": {"architecture": tiny_base(kind, tied=tied).config.to_dict(), **model},
            "data": {"train": "x", "sequence_length": 16, "text_template": "{a}"},
            "stages": [{"name": "s", "train": trained, "steps": 1}],
            "start": start,
        }
    )


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_counts_are_the_models(kind: str) -> None:
    draw = random.Random(kind)
    for _ in range(DRAWS):
        tied = draw.random() < 0.5
        config = drawn(kind, tied, draw)
        base = dict(config.model.architecture or {})
        lora = config.model.lora.model_dump() if config.trains("lora") else None
        model = tiny_model(kind, tied=tied, lora=lora, **config.model_shape())
        heads = nn.ModuleDict(model.heads)
        features = feature_members(model.features)
        members = head_members(heads)

        def count(found: Any) -> int:
            return sum(parameter.numel() for parameter in found)

        engine = count(member.parameter for member in features)
        trained = [member.parameter for member in (*features, *members) if config.trains(member.group)]
        moments = engine + count(member.parameter for member in members if config.trains(member.group))
        planned = plan(config, nodes=1, gpus_per_node=1, architecture=base)
        expected = {
            "base": count(tiny_base(kind, tied=tied).parameters()),
            "trained": count(trained),
            "engine": engine,
            "checkpoint": 4 * (engine + count(heads.parameters())) + 8 * moments,
        }
        found = {
            "base": planned.base_parameters,
            "trained": planned.trainable_parameters,
            "engine": sum(feature_counts(config, Architecture.of(base), config.trained).values()),
            "checkpoint": planned.checkpoint_bytes,
        }
        assert found == expected, config.model_dump(exclude_defaults=True)
