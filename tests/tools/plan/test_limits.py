"""`cqwen plan --limits`: the largest base and the longest text that fit, and what bounds them."""

from __future__ import annotations

from cqwen_dist.config import Config
from cqwen_dist.sizes.architecture import Architecture, known_architecture
from cqwen_dist.tools.plan import limits as module
from cqwen_dist.tools.plan.limits import CONTEXT, limits
from cqwen_dist.tools.plan.machine import MACHINES

NAME = "meta-llama/Llama-3.1-8B"


def test_more_gpus_hold_larger_bases_and_longer_texts(monkeypatch) -> None:
    monkeypatch.setattr(module, "GPUS", (1, 8))
    document = {"model": {"name_or_path": NAME}, "data": {"train": "x"}, "train": {"precision": "bf16"}}
    config = Config.model_validate(document)
    one, node = limits(config, known_architecture(NAME) or {}, MACHINES["h100"], 24.0)
    small, large = (Architecture.of(known_architecture(row.base) or {}).base_parameters for row in (one, node))
    assert 2 * small / 2**30 < one.base_gib <= 24 >= node.base_gib
    assert 2 * small < large
    assert "backbone (frozen)" in one.larger
    assert 1024 <= one.longest < node.longest
    assert "GiB" in one.longer
    assert node.longer == CONTEXT or "GiB" in node.longer
