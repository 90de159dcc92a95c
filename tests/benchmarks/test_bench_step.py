"""`bench step` and `bench memory` on sizes that take seconds: documents that hold, not figures."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks
from support.runs import as_rank, qwen2_sizes

from cqwen_dist.config import Config

pytestmark = pytest.mark.slow
TINY = qwen2_sizes(300, 32, 48, 4, 2, tie_word_embeddings=True)


def bench(folder: str) -> dict[str, Any]:

    from benchmarks.step import run
    from cqwen_dist.tools.plan.cost import MACHINES

    config = Config.model_validate(
        {
            "model": {"architecture": TINY},
            "data": {"train": "unused", "sequence_length": 16},
            "stages": [
                {"name": "heads", "train": ["heads"], "steps": 5},
                {"name": "all", "train": ["heads", "embedding", "lora"], "steps": 5},
            ],
            "train": {"micro_batch_size": 2, "global_batch_size": 4},
        }
    )
    return run(config, TINY, as_rank(), MACHINES["cpu"], 1e11, rounds=2, profile=Path(folder))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = run_ranks(bench, 1, str(tmp_path_factory.mktemp("profile")))
    return found


def test_every_contender_has_a_row(result):
    assert [row["name"] for row in result["rows"]] == ["heads", "heads, z cached", "all", "hf+peft", "hf+peft+liger"]
    measured = [row for row in result["rows"] if "skipped" not in row]
    assert len(measured) == 4
    assert all(row["tokens_per_s"] > 0 for row in measured)
    assert json.loads(json.dumps(result)) == result


def test_the_parts_add_up_to_the_step(result):
    heads, everything = (row["parts_s"] for row in result["rows"] if "parts_s" in row)
    assert set(everything) == {"data", "backbone_forward", "heads", "backbone_backward", "optimizer", "rest"}
    assert set(heads) == set(everything) - {"backbone_backward"}  # nothing before z is differentiated
    assert min(*heads.values(), *everything.values()) > 0


def test_launches_are_counted_by_part(result):
    ours, peer = (next(row for row in result["rows"] if row["name"] == name) for name in ("all", "hf+peft"))
    assert set(ours["operations"]) >= {"data", "backbone_forward", "heads", "backbone_backward", "optimizer"}
    assert set(peer["operations"]) == {"data", "backbone_forward", "backbone_backward", "optimizer"}
    assert sum(ours["waits"].values()) == 1  # the norm
    # The peer's forward pass holds its softmax head too.
    for part in ("backbone_forward", "backbone_backward"):
        assert ours["operations"][part] < peer["operations"][part], part
