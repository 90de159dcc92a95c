"""Collectives by way of the host: what gloo itself gives, wherever the tensors lie, and through views of one buffer."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.devices import KINDS
from support.ranks import Pool
from support.staged import StagedGroup

from cqwen_dist.parallel.collectives import all_gather_into, barrier, gather_objects, reduce_scatter_into, sum_over
from cqwen_dist.parallel.groups import build_groups, limit_wait

WORLD = 4
KIND = pytest.mark.parametrize("kind", KINDS)


def of_the_package(kind: str, dtype: torch.dtype) -> None:
    """On this rank: each collective that the package uses, against its sum written out."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device(kind)
    groups = build_groups(2)
    assert isinstance(groups.world, StagedGroup)
    assert isinstance(groups.vocab, StagedGroup)
    limit_wait(groups.world, 60.0)
    mine = torch.arange(6, device=device).to(dtype) + 10 * rank
    total = sum(torch.arange(6) + 10 * r for r in range(world)).to(dtype)
    assert torch.equal(sum_over(mine.clone()).cpu(), total)
    mates = dist.get_process_group_ranks(groups.vocab)
    of_mates = sum(torch.arange(6) + 10 * r for r in mates).to(dtype)
    assert torch.equal(sum_over(mine.clone(), groups.vocab).cpu(), of_mates)
    everyone = torch.empty(6 * world, dtype=dtype, device=device)
    all_gather_into(everyone, mine)
    assert everyone.cpu().tolist() == [i + 10 * r for r in range(world) for i in range(6)]
    part = torch.empty(2, dtype=dtype, device=device)
    reduce_scatter_into(part, mine[:4].contiguous(), groups.vocab)
    place = dist.get_rank(groups.vocab)
    assert part.cpu().tolist() == [sum(i + 10 * r for r in mates) for i in range(2 * place, 2 * place + 2)]
    assert gather_objects(rank) == list(range(world))
    barrier()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@KIND
def test_collectives_of_the_package_by_way_of_the_host(pool: Pool, kind: str, dtype: torch.dtype) -> None:
    pool(of_the_package, WORLD, kind, dtype, staged=kind)


def of_deepspeed(kind: str) -> None:
    """As DeepSpeed calls them: into a view of the input, asynchronously, with a list."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device(kind)
    flat = torch.arange(8.0, device=device) + rank
    own = flat.chunk(world)[rank]
    dist.reduce_scatter_tensor(own, flat)
    assert own.cpu().tolist() == [world * i + sum(range(world)) for i in (2 * rank, 2 * rank + 1)]
    buffer = torch.zeros(3 * world, device=device)
    view = buffer.narrow(0, 3 * rank, 3).fill_(rank + 1.0)
    dist.all_gather_into_tensor(buffer, view, async_op=True).wait()
    assert buffer.cpu().tolist() == [r + 1.0 for r in range(world) for _ in range(3)]
    parts = [torch.zeros(2, device=device) for _ in range(world)]
    dist.all_gather(parts, torch.full((2,), float(rank), device=device))
    assert [p[0].item() for p in parts] == list(range(world))
    value = torch.full((3,), float(rank), device=device)
    dist.broadcast(value, 1)
    assert value.tolist() == [1.0] * 3
    value = torch.full((3,), float(rank), device=device)
    dist.reduce(value, 2)
    assert rank != 2 or value.tolist() == [6.0] * 3
    largest = torch.tensor(float(rank), device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert largest.item() == world - 1
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as both:
        outputs = [torch.empty(world * n, device=device) for n in (1, 2)]
        for output in outputs:
            dist.all_gather_into_tensor(output, torch.full((output.numel() // world,), float(rank), device=device))
    both.wait()
    assert outputs[1].cpu().tolist() == [float(r) for r in range(world) for _ in range(2)]
    dist.new_group(backend="gloo", timeout=timedelta(seconds=30))  # as the saving thread's


@KIND
def test_collectives_of_deepspeed_by_way_of_the_host(pool: Pool, kind: str) -> None:
    pool(of_deepspeed, WORLD, kind, staged=kind)
