"""Memory of training steps as the plan says it: in one process, and on one rank of a world that does not exist."""

import json
from collections.abc import Callable
from functools import partial
from subprocess import CompletedProcess as Ran
from threading import Thread

import pytest
import torch
from support.ranks import run_ranks
from support.runs import as_rank, cqwen, cqwen_forked

from benchmarks.memory_check import HEADS, cases
from benchmarks.step_memory import ALL, BF16, SMALL, Case, config_of, peak_of


def planned_over_measured(chosen: list[Case]) -> list[tuple[str, float]]:

    from benchmarks.step_memory import measure
    from cqwen_dist.parallel.groups import build_groups

    runtime, groups = as_rank(), build_groups(1)
    return [
        (case.name, measure(config_of(case), case.architecture, runtime, groups, case.runs)["ratio"]) for case in chosen
    ]


QUICK = ("adapters on all, bf16", "heads alone", "one short sequence", "4 runs of a job, all")


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


def handed_over() -> Callable[[], None]:
    """Four tensors of 1 MiB, one after the other, each freed by another thread."""

    def work() -> None:
        for _ in range(4):
            held = [torch.empty(2**20, dtype=torch.uint8)]
            other = Thread(target=held.clear)
            other.start()
            other.join()

    return work


def test_memory_freed_by_another_thread_counts_as_free() -> None:
    """As gloo's threads do behind a collective: `cqwen accept` on a busy machine found a third too much in ZeRO-3."""
    assert peak_of(handed_over, torch.device("cpu")) == 2**20


def fake_collectives(_: int) -> list[list[float]]:
    """In a fresh process, whose real group is put down first."""
    import torch.distributed as dist

    from benchmarks.fake_world import one_of
    from cqwen_dist.parallel.collectives import all_gather_into, gather_objects, reduce_scatter_into, sum_over
    from cqwen_dist.parallel.groups import build_groups

    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    with one_of(64) as runtime:
        groups = build_groups(8)
        sizes = [runtime.world_size, groups.vocab_size, groups.vocab_rank, groups.world_size]
        part = torch.full((3,), torch.nan)
        reduce_scatter_into(part, torch.arange(24.0), groups.vocab)
        everyone = torch.full((16,), torch.nan)
        all_gather_into(everyone, torch.tensor([1.0, 2.0]), groups.vocab)
        found = [sizes, part.tolist(), everyone.tolist(), sum_over(torch.ones(2)).tolist(), gather_objects(5.0)]
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=0, world_size=1)
    return found


@pytest.mark.slow
def test_fake_collectives_write_every_output() -> None:
    """A NaN would refuse the step, and the moments would never be allocated."""
    (found,) = run_ranks(fake_collectives, 1, 0)
    sizes, part, everyone, total, objects = found
    assert sizes == [64, 8, 0, 64]
    assert part == [0.0, 1.0, 2.0]
    assert everyone == [1.0, 2.0] * 8
    assert total == [1.0, 1.0]
    assert objects == [5.0] * 64
