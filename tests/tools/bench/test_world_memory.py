"""One rank of a world that does not exist: what it allocates is what the plan says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from subprocess import CompletedProcess as Ran
from threading import Thread

import pytest
import torch
from support.ranks import run_ranks
from support.runs import cqwen, cqwen_forked

from cqwen_dist.tools.bench.memory_check import peak_of

WORLDS = (8, 64, 1024)


def planned_over_measured(world: int, *names: str, cqwen: Callable[..., Ran] = cqwen_forked) -> dict[str, float]:
    words = [word for name in names for word in ("--only", name)]
    done = cqwen("bench", "memory", "--world", world, "--json", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert f"rank 0 of {world}" in found["device"]
    return {row["name"]: row["ratio"] for row in found["rows"]}


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


def test_one_rank_of_64_holds_the_planned_memory() -> None:
    ratios = planned_over_measured(64, "ZeRO-3, bf16, q and v")
    assert len(ratios) == 1
    for name, ratio in ratios.items():
        assert 0.95 < ratio < 1.05, f"{name}: planned / measured {ratio:.3f}"


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_one_rank_of_any_world_holds_the_planned_memory(world: int) -> None:
    ratios = planned_over_measured(world)
    assert len(ratios) == 9
    for name, ratio in ratios.items():
        assert 0.95 < ratio < 1.05, f"{name}: planned / measured {ratio:.3f}"


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none here")
def test_one_rank_of_64_on_a_gpu_holds_the_planned_memory_for_7b_to_72b() -> None:
    ratios = planned_over_measured(64, cqwen=partial(cqwen, DS_ACCELERATOR="cuda"))
    assert len(ratios) == 4
    for name, ratio in ratios.items():
        assert 0.95 < ratio < 1.05, f"{name}: planned / measured {ratio:.3f}"


def fake_collectives(_: int) -> list[list[float]]:
    """In a fresh process, whose real group is put down first."""
    import torch.distributed as dist

    from cqwen_dist.parallel.collectives import all_gather_into, gather_objects, reduce_scatter_into, sum_over
    from cqwen_dist.parallel.groups import build_groups
    from cqwen_dist.tools.site.fake_world import one_of

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


def test_fake_collectives_write_every_output() -> None:
    """A NaN would refuse the step, and the moments would never be allocated."""
    (found,) = run_ranks(fake_collectives, 1, 0)
    sizes, part, everyone, total, objects = found
    assert sizes == [64, 8, 0, 64]
    assert part == [0.0, 1.0, 2.0]
    assert everyone == [1.0, 2.0] * 8
    assert total == [1.0, 1.0]
    assert objects == [5.0] * 64


@pytest.mark.parametrize("world", [1, 5000])
def test_refuses_a_world_without_ranks(world: int) -> None:
    done = cqwen_forked("bench", "memory", "--world", world)
    assert done.returncode == 2
    assert "--world" in done.stderr


def test_refuses_a_config_without_a_world_size() -> None:
    done = cqwen_forked("bench", "memory", "configs/qwen2.5-72b.yaml")
    assert done.returncode == 2
    assert "--world" in done.stderr
