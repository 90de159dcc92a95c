"""Memory of training steps as the plan says it: in one process, and on one rank of a world that does not exist."""

import json
from collections.abc import Callable
from functools import partial
from subprocess import CompletedProcess as Ran

import pytest
import torch
from support.ranks import run_ranks
from support.runs import as_rank, cqwen, cqwen_forked

from benchmarks.memory_check import HEADS, cases
from benchmarks.step_memory import ALL, BF16, SMALL, Case, config_of


def planned_over_measured(chosen: list[Case]) -> list[tuple[str, float]]:

    from benchmarks.step_memory import measure
    from cqwen_dist.parallel.groups import build_groups

    runtime, groups = as_rank(), build_groups(1)
    return [(case.name, measure(config_of(case), case.architecture, runtime, groups)["ratio"]) for case in chosen]


QUICK = ("adapters on all, bf16", "heads alone", "one short sequence")


@pytest.mark.slow
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


@pytest.mark.gpu
def test_planned_memory_equals_measured_memory_on_a_gpu():
    from benchmarks.memory_check import measure_all

    rows, _ = measure_all([])
    for row in rows:
        assert 0.9 < row["ratio"] < 1.1, f"{row['name']}: planned / measured {row['ratio']:.3f}"


def in_world(world: int, *names: str, run: Callable[..., Ran] = cqwen_forked) -> dict[str, float]:
    words = [word for name in names for word in ("--only", name)]
    done = run("memory", "--world", world, "--json", *words, program="benchmarks")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert f"rank 0 of {world}" in found["device"]
    return {row["name"]: row["ratio"] for row in found["rows"]}


@pytest.mark.slow
def test_one_rank_of_64_holds_the_planned_memory() -> None:
    ratios = in_world(64, "ZeRO-3, bf16, q and v")
    assert len(ratios) == 1
    for name, ratio in ratios.items():
        assert 0.95 < ratio < 1.05, f"{name}: planned / measured {ratio:.3f}"


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none here")
def test_one_rank_of_64_on_a_gpu_holds_the_planned_memory_for_7b_to_72b() -> None:
    ratios = in_world(64, run=partial(cqwen, DS_ACCELERATOR="cuda"))
    assert len(ratios) == 4
    for name, ratio in ratios.items():
        assert 0.95 < ratio < 1.05, f"{name}: planned / measured {ratio:.3f}"
