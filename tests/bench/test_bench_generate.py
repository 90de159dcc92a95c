"""`cqwen bench generate` at a tiny shape: every mode beside Hugging Face, on one and the same model."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from cqwen_dist.bench import generate as bench


def test_every_mode_is_timed_beside_hugging_face() -> None:
    torch.manual_seed(0)
    result = bench.run(hidden=64, layers=1, vocab=300, batches=(1, 2), prompt=5, new_tokens=3, rounds=2)
    rows = result["results"]
    assert [row["batch"] for row in rows] == [1] * 7 + [2] * 7
    assert {row["contender"] for row in rows} == {"Hugging Face", "standard, all scales", *bench.MODES}
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert row["ratio_least"] <= row["ratio"] <= row["ratio_most"]
    assert all(row["ratio"] == 1.0 for row in rows if row["contender"] == "Hugging Face")
    Console(quiet=True).print(bench.table(result))


def test_both_contenders_are_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The causal one's greedy text in mode compatible is the base's own: what is timed does the same work."""
    seen = {}
    make = bench._causal

    def keep(base, vocab):
        seen["base"], seen["causal"] = base, make(base, vocab)
        return seen["causal"]

    monkeypatch.setattr(bench, "_causal", keep)
    bench.run(hidden=64, layers=1, vocab=300, batches=(1,), prompt=5, new_tokens=1, rounds=1)
    ids = torch.tensor([[3, 8, 41, 7]])
    theirs = seen["base"].generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=0)
    assert torch.equal(seen["causal"].generate(ids, mode="compatible", max_new_tokens=6), theirs)
