"""`bench step` and `bench memory` on sizes that take seconds: documents that hold, not figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks
from support.runs import as_rank

from cqwen_dist.config import Config
from cqwen_dist.tools.bench.memory_check import ALL, BF16, HEADS, SMALL, Case, cases, config_of
from cqwen_dist.tools.bench.parts import Marks

TINY: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def bench(folder: str) -> dict[str, Any]:

    from cqwen_dist.tools.bench.step import run
    from cqwen_dist.tools.plan.machine import MACHINES

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


def test_measured_ratios_are_shown_with_those_predicted_by_operations(result):
    ratios = [row["ratio"] for row in result["rows"] if "ratio" in row]
    assert len(ratios) == 2
    assert all(ratio["measured"] > 0 and ratio["by_operations"] > 0 for ratio in ratios)


def test_launches_are_counted_by_part(result):
    ours, peer = (next(row for row in result["rows"] if row["name"] == name) for name in ("all", "hf+peft"))
    assert set(ours["operations"]) >= {"data", "backbone_forward", "heads", "backbone_backward", "optimizer"}
    assert set(peer["operations"]) == {"data", "backbone_forward", "backbone_backward", "optimizer"}
    assert sum(ours["waits"].values()) == 1  # the norm
    # The peer's forward pass holds its softmax head too.
    for part in ("backbone_forward", "backbone_backward"):
        assert ours["operations"][part] < peer["operations"][part], part


def test_the_planner_can_be_calibrated_with_the_benchmark(result, tmp_path):
    from cqwen_dist.tools.plan.machine import machine

    file = tmp_path / "bench.json"
    file.write_text(json.dumps(result))
    factors = dict(machine("cpu", "ib400", file).factors)
    assert set(factors) == {"backbone_forward", "backbone_backward", "heads", "optimizer"}


def test_the_profile_is_written(result):
    for found in result["profiles"]:
        assert Path(found["trace"]).stat().st_size > 1000
        assert "Name" in Path(found["table"]).read_text()


def test_the_table_is_readable(result):
    import io

    from rich.console import Console

    from cqwen_dist.tools.bench.step_table import table

    out = io.StringIO()
    Console(file=out, width=200).print(table(result))
    for word in ("heads, z cached", "by operations", "hf+peft+liger", "skipped", "Operations launched in a step"):
        assert word in out.getvalue()


def test_a_failing_compiler_leaves_the_eager_and_peer_figures(monkeypatch):
    import torch

    from cqwen_dist.parallel.runtime import Runtime
    from cqwen_dist.tools.bench import step
    from cqwen_dist.tools.bench.step_table import table
    from cqwen_dist.tools.plan.machine import MACHINES
    from cqwen_dist.tools.plan.stage_sizes import stage_sizes

    config = config_of(Case("", TINY, {}, [["heads", "lora"]]))
    sizes = stage_sizes(config, step.Architecture.of(TINY), world=1, kind="cpu")
    timed = {"step_s": {"median": 2.0, "min": 2.0, "max": 2.0}, "tokens_per_s": 1.0, "mfu": 0.1, "trainable": []}

    def ours(timer, config, *rest):
        if config.model.compile_layers:
            raise RuntimeError("no C++ compiler")
        return [{"name": "first", "parts_s": {}, "communication_s": 0.0, **timed}], [], sizes

    def peer(timer, name, build, batches, s, own):
        return {"name": name, "own": own and own["name"], **timed}

    monkeypatch.setattr(step, "_ours", ours)
    monkeypatch.setattr(step, "_peer", peer)
    runtime = Runtime(0, 1, torch.device("cpu"), 60.0)
    found = step.run(config, TINY, runtime, MACHINES["cpu"], None, rounds=1, both=True)
    first, compiled, *peers = found["rows"]
    assert (first["name"], compiled["skipped"]) == ("first", "RuntimeError: no C++ compiler")
    names = {row["name"]: row["own"] for row in peers}
    assert (names["hf+peft"], names["hf+peft, compiled"]) == ("first", None)
    assert table(found).renderables


def test_a_case_out_of_memory_leaves_the_other_figures(monkeypatch):
    import torch

    from cqwen_dist.tools.bench import memory_check

    def measured(config, architecture, runtime):
        if config.train.micro_batch_size == 16:
            raise torch.OutOfMemoryError("tried to allocate 40 GiB")
        return {"measured_mib": 2.0, "predicted_mib": 2.0, "ratio": 1.0, "stage": "first", "moment": "the loss"}

    monkeypatch.setattr(memory_check, "measure", measured)
    chosen = [(case.name, config_of(case), case.architecture) for case in cases("cuda")[:3]]
    rows = memory_check._measured(chosen, None, [])
    assert [row.get("skipped", "")[:16] for row in rows] == ["", "", "OutOfMemoryError"]
    assert memory_check.table(rows, "cuda").row_count == 3


def test_time_between_marks_adds_up_by_part():
    import torch

    marks = Marks(torch.device("cpu"))
    marks.found = [("begin", 0.0), ("a", 1.0), ("b", 1.5), ("a", 3.5)]
    assert marks.seconds() == {"a": 3.0, "b": 0.5}
    assert marks.seconds() == {}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_configurations_that_bench_memory_tries(kind):
    tried = cases(kind)
    assert len({case.name for case in tried}) == len(tried) >= 20
    for case in tried:
        config = config_of(case)
        assert config.train.global_batch_size % config.train.micro_batch_size == 0


def planned_over_measured(chosen: list[Case]) -> list[tuple[str, float]]:

    from cqwen_dist.parallel.groups import build_groups
    from cqwen_dist.tools.bench.memory_check import measure

    runtime, groups = as_rank(), build_groups(1)
    return [(case.name, measure(config_of(case), case.architecture, runtime, groups)["ratio"]) for case in chosen]


QUICK = ("adapters on all, bf16", "heads alone", "one short sequence")


def test_planned_memory_equals_measured_memory_on_a_few_cases():
    chosen = [case for case in cases("cpu") if case.name in QUICK]
    assert len(chosen) == len(QUICK)
    (found,) = run_ranks(planned_over_measured, 1, chosen)
    for name, ratio in found:
        assert 0.9 < ratio < 1.1, f"{name}: planned / measured {ratio:.3f}"


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_planned_memory_of_a_rounded_base_equals_measured_memory(kind: str) -> None:
    """Where the largest dequantised weight counts, and where the loss does."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install cqwen-dist[quant])")
    wide = {**SMALL, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "vocab_size": 200}
    short = {"data.sequence_length": 32, "train.micro_batch_size": 1, "train.global_batch_size": 1}
    chosen = [
        Case("one map", wide, {"model.quantize": kind} | short, [ALL]),
        Case("one map, heads, bf16", wide, {"model.quantize": kind} | short | BF16, [HEADS]),
        Case("the loss, bf16", SMALL, {"model.quantize": kind} | BF16, [ALL]),
    ]
    (found,) = run_ranks(planned_over_measured, 1, chosen)
    for name, ratio in found:
        assert 0.95 < ratio < 1.05, f"{name}: planned / measured {ratio:.3f}"


@pytest.mark.slow
def test_planned_memory_equals_measured_memory():
    (found,) = run_ranks(planned_over_measured, 1, cases("cpu"), timeout=880)
    assert len(found) >= 20
    for name, ratio in found:
        assert 0.9 < ratio < 1.1, f"{name}: planned / measured {ratio:.3f}"


@pytest.mark.gpu
def test_planned_memory_equals_measured_memory_on_a_gpu():
    from cqwen_dist.tools.bench.memory_check import measure_all

    rows, _ = measure_all([])
    for row in rows:
        assert 0.9 < row["ratio"] < 1.1, f"{row['name']}: planned / measured {row['ratio']:.3f}"
