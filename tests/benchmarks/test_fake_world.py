"""One rank of a world that does not exist, and the peak of what it allocates."""

from collections.abc import Callable
from threading import Thread

import pytest
import torch
from support.ranks import run_ranks

from benchmarks.step_memory import peak_of


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
