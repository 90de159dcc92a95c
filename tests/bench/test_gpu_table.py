"""launch/gpu_table.py: its rows out of what the benchmarks print, and a command that fails."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from cqwen_dist.bench import loss


@pytest.fixture(scope="module")
def gpu_table() -> ModuleType:
    path = Path(__file__).parents[2] / "launch" / "gpu_table.py"
    spec = importlib.util.spec_from_file_location("gpu_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loss_has_a_row_for_each_contender_that_ran(gpu_table: ModuleType) -> None:
    found = loss.run(tokens=8, hidden=8, vocab=64, device="cpu", rounds=1, only=["this", "stable"])
    rows = list(gpu_table.loss(22, 17.5)(json.loads(json.dumps(found))))
    assert [what for what, _, _ in rows] == [f"loss, H=8, {name}" for name in ("floor", "this", "stable")]
    assert all(" ms" in measured for _, measured, _ in rows)


def test_what_is_asked_for_is_asked_of_contenders_that_exist(gpu_table: ModuleType) -> None:
    rows = [{"name": name, "seconds": {"median": 0.02}, "extra_mib": 300.0} for name in loss.contenders("auto")]
    table = {what: asked for what, _, asked in gpu_table.loss(22, 17.5)({"hidden": 896, "rows": rows})}
    assert table["loss, H=896, fused"] == "at most 22 ms, 400 MiB"
    assert table["loss, H=896, fused fp8"] == "at most 17.5 ms"


def test_a_command_that_fails_is_a_line_and_is_tried_again(gpu_table: ModuleType, tmp_path: Path) -> None:
    said = gpu_table.measured("packing", ["bench", "packed", str(tmp_path / "none.yaml")], tmp_path)
    assert said == "failed with exit code 2; its error is above"
    assert not list(tmp_path.iterdir())
