"""`python -m benchmarks generate` at a tiny shape: every mode beside Hugging Face, on one and the same model."""

from __future__ import annotations

import torch

from benchmarks import generate as bench
from cqwen_dist.generate.modes import MODES


def test_every_mode_is_timed_beside_hugging_face() -> None:
    torch.manual_seed(0)
    result = bench.run(hidden=64, layers=1, vocab=300, batches=(1, 2), prompt=5, new_tokens=3, rounds=2)
    rows = result["results"]
    each = 2 * (1 + len(bench.MODES)) + 1
    assert [row["batch"] for row in rows] == [1] * each + [2] * each
    assert {row["contender"] for row in rows} == {"Hugging Face", "standard, all scales", *bench.MODES}
    assert {row["cache"] for row in rows} == {"dynamic", "static"}
    assert set(bench.MODES) == set(MODES), "every mode is timed"
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert row["ratio_least"] <= row["ratio"] <= row["ratio_most"]
    assert bench.SHAPES["cuda"][0] == (1, 8, 64)
    assert all(row["ratio"] == 1.0 for row in rows if row["contender"] == "Hugging Face")
