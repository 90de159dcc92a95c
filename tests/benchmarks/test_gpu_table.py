"""The GPU table: contenders in turns, what a failing one leaves, the rehearsal, a machine without a GPU."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def failing() -> Iterator[Any]:
    print("what it printed")
    yield None
    raise RuntimeError("tried to allocate 40 GiB")


@pytest.mark.slow  # .ci/run rehearses the whole table
def test_a_rehearsal_measures_the_loss_after_a_check_against_float64(tmp_path: Path) -> None:
    command = ["gpu", "--rehearse", "--only", "loss, H=32", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "benchmarks", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "table.md", "log.txt"}
    rows = {row["name"]: row for row in json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["rows"]}
    assert 0 < max(rows["triton"]["result"]["errors"].values()) < 4e-3
    assert "liger" in rows
    assert (tmp_path / "table.md").read_text(encoding="utf-8").strip() in done.stdout


def test_a_wrong_contender_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_works, loss

    right = loss._ours
    monkeypatch.setattr(loss, "_ours", lambda p, impl: lambda: [right(p, impl)(), p.weight.grad.mul_(2)])
    with pytest.raises(ArithmeticError, match="wrong against float64"):
        next(gpu_works.loss("this", gpu_works.TOY, 32)())
