"""launch/gpu_table.py: its rows out of what the benchmarks print, and a command that fails."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from cqwen_dist.config import Config, load_config, refuse_ranks
from cqwen_dist.data.load import load_datasets, tokenizer_of
from cqwen_dist.tools.bench import loss


@pytest.fixture(scope="module")
def gpu_table() -> ModuleType:
    path = Path(__file__).parents[3] / "launch" / "gpu_table.py"
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


def test_every_target_belongs_to_a_contender_that_exists(gpu_table: ModuleType) -> None:
    rows = [{"name": name, "seconds": {"median": 0.02}, "extra_mib": 300.0} for name in loss.contenders("auto")]
    found = {"hidden": 896, "rows": rows, "skipped": {}}
    table = {what: asked for what, _, asked in gpu_table.loss(22, 17.5)(found)}
    assert table["loss, H=896, fused"] == "at most 22 ms, 400 MiB"
    assert table["loss, H=896, fused fp8"] == "at most 17.5 ms"


def test_a_failing_contender_leaves_the_other_figures(gpu_table: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(problem: loss.Problem) -> None:
        raise torch.OutOfMemoryError("tried to allocate 40 GiB")

    monkeypatch.setattr(loss, "_seed_formula", out_of_memory)
    found = loss.run(tokens=8, hidden=8, vocab=64, device="cpu", rounds=1, only=["seed", "this"])
    assert [row["name"] for row in found["rows"]] == ["floor", "this"]
    *_, last = gpu_table.loss(22, 17.5)(json.loads(json.dumps(found)))
    assert last == ("loss, H=8, seed", "skipped: OutOfMemoryError: tried to allocate 40 GiB", "")


def test_every_config_runs_on_one_rank(gpu_table: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    measures = [m.command for m in gpu_table.MEASURES.values() if m.command[1] in ("step", "packed")]
    assert len(measures) == 3
    for _, _, config, *words in measures:
        checked = load_config(Path(config), [word for word in words if not word.startswith("--")])
        refuse_ranks(checked.parallel.vocab_group_size, 1)


def test_packing_is_measured_on_this_projects_pages(gpu_table: ModuleType, tmp_path: Path) -> None:
    lines = gpu_table.pages(tmp_path).read_text(encoding="utf-8").splitlines()
    lengths = sorted(len(json.loads(line)["text"]) for line in lines)
    assert len(lengths) > 300
    assert lengths[-len(lengths) // 10] > 10 * lengths[len(lengths) // 10], "of very different lengths"
    config, *overrides = (word.replace("OUT", str(tmp_path)) for word in gpu_table.PACKED)
    checked = load_config(Path(__file__).parents[3] / config, overrides)
    assert checked.data.train == str(tmp_path / "pages.jsonl")
    assert sum(map(len, tokens_of(checked))) > 2 * 8 * 1024, "tokens for packed rows and for padded ones"


def tokens_of(config: Config) -> list[list[int]]:
    """The texts, by a tokenizer that is trained on them."""
    datasets = load_datasets(config.data, tokenizer_of(config))
    return [document.ids.tolist() for i in range(len(datasets.train)) for document in datasets.train[i]]


def test_a_failed_command_is_one_row_and_runs_again_next_time(gpu_table: ModuleType, tmp_path: Path) -> None:
    said = gpu_table.measured("packing", ["bench", "packed", str(tmp_path / "none.yaml")], tmp_path)
    assert said == "failed with exit code 2; its error is above"
    assert not list(tmp_path.iterdir())
