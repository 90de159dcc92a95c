"""Where a step's gradient is clipped: at a number, or at three times what is usual in this stage."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks
from support.runs import as_rank, losses, metrics, set_back, write_config

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.config import load_config
from cqwen_dist.training.zero.engine import UsualNorm


def test_a_fixed_norm_limit_never_changes() -> None:
    usual = UsualNorm(1.5)
    for norm in (0.1, 1e6, 3.0, 3.0, 3.0, 3.0, 3.0):
        assert usual.limit() == 1.5
        usual.add(norm)


def test_nothing_is_clipped_before_five_norms_are_known() -> None:
    usual = UsualNorm(None)
    for norm in (1.0, 1e9, 2.0, 3.0, 1e-9):
        assert usual.limit() == math.inf
        usual.add(norm)
    assert usual.limit() == 3 * 2.0


def test_the_usual_limit_is_three_times_the_median_of_64_norms() -> None:
    usual, norms = UsualNorm(None), [float(1 + (37 * k) % 101) for k in range(200)]
    for k, norm in enumerate(norms):
        if k >= 5:
            assert usual.limit() == 3 * statistics.median(norms[max(0, k - 64) : k])
        usual.add(norm)
    assert usual.seen == norms[-64:]


def test_a_spike_is_clipped_and_hardly_changes_the_next_limit() -> None:
    usual = UsualNorm(None)
    for k in range(20):
        usual.add(1000.0 + k)
    before = usual.limit()
    assert before < 1e6
    usual.add(1e6)
    assert usual.limit() == pytest.approx(before, rel=0.01)


def test_gradients_of_zero_set_no_limit() -> None:
    """w_num alone on texts without numbers: 0/0 would be in every weight."""
    usual = UsualNorm(None)
    for _ in range(10):
        usual.add(0.0)
    assert usual.limit() == math.inf


def test_the_seen_norms_round_trip_through_json() -> None:
    usual, again = UsualNorm(None), UsualNorm(None)
    for k in range(9):
        usual.add(0.1 * k + 1 / 3)
    again.seen = list(json.loads(json.dumps(usual.seen)))
    assert again.limit() == usual.limit()


# ------------------------------------------------------------------------------------------------------------ runs


def _train_clipping_half(config: str, overrides: list[str]) -> dict[str, Any]:
    """A run that takes a step of more than the usual norm for unlike the others: about every second one."""
    from cqwen_dist.training.train import train_on

    UsualNorm.TIMES = 1.0
    return train_on(load_config(config, overrides), as_rank())


def weights_of(run: Path, step: int) -> dict[str, str]:
    """Checksums of all weights and moments of a checkpoint, by file name."""
    files = json.loads((checkpoint_folder(run, step) / "manifest.json").read_text())["files"]
    return {name: record["sha256"] for name, record in files.items() if name.endswith(".safetensors")}


def test_a_resumed_run_clips_as_the_undisturbed_one(tmp_path: Path) -> None:
    stages = [
        {"name": "heads", "train": ["heads", "embedding"], "steps": 9, "lr": 1e-2},
        {"name": "lora", "train": ["heads", "embedding", "lora"], "steps": 7, "lr": 1e-2},
    ]
    more = {"train__max_grad_norm": "usual", "train__checkpoint_every": 1, "train__keep_checkpoints": 99}
    config = write_config(tmp_path, stages=stages, **more)
    run_ranks(_train_clipping_half, 1, str(config), [])
    run = tmp_path / "run"
    norms, clipped = ([record[f"train/{name}"] for record in metrics(run)] for name in ("grad_norm", "clipped"))
    for first, steps in ((0, 9), (9, 7)):  # what is usual begins anew where LoRA wakes
        for k in range(steps):
            before = norms[first : first + k]
            limit = statistics.median(before) if k >= 5 else math.inf
            if abs(norms[first + k] / limit - 1) > 1e-5:  # logged to fewer digits than it has
                assert clipped[first + k] == (norms[first + k] > limit), first + k
    assert sum(clipped[:9]) > 0, "nothing clipped: nothing is tested"
    state = json.loads((checkpoint_folder(run, 7) / "state.json").read_text())
    assert state["norms"] == pytest.approx(norms[:7], rel=1e-5)

    copy = tmp_path / "again" / "run"
    set_back(run, copy, 7)
    run_ranks(_train_clipping_half, 1, str(config), [f"run.dir={copy}"])
    assert losses(copy) == losses(run)
    assert [record["train/clipped"] for record in metrics(copy)] == clipped
    assert weights_of(copy, 16) == weights_of(run, 16)
