"""Plain collectives on ranks: what they return, and how their failures read."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from cqwen_dist.config import UserError
from cqwen_dist.parallel.collectives import (
    CollectiveError,
    gather_from_owners,
    gather_objects,
    gather_rows,
    main_rank_first,
    naming,
    reduce_scatter_into,
    sum_over,
    sum_to_owners,
)


def refuse() -> None:
    raise UserError("key", 1, "2")


def break_down() -> None:
    raise ValueError("the reason")


def collectives() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    assert sum_over(torch.tensor([1.0, float(rank)])).tolist() == [world, sum(range(world))]
    assert gather_rows(torch.tensor([rank, 7])).tolist() == [[r, 7] for r in range(world)]
    owner = torch.arange(world).repeat_interleave(2)  # of each row
    for reduce in (sum_to_owners, lambda parts, group: reduce_scatter_into(parts.chunk(world)[rank], parts, group)):
        parts = torch.full((2 * world, 3), float(rank)) + owner[:, None]
        reduce(parts, dist.group.WORLD)  # on a GPU it is the second, which writes into its input
        summed = sum(range(world)) + world * owner[:, None].float().expand(-1, 3)
        assert torch.equal(parts[owner == rank], summed[owner == rank])
        parts[owner != rank] = torch.nan
        gather_from_owners(parts, dist.group.WORLD)
        assert torch.equal(parts, summed)
    assert gather_objects({"rank": rank}) == [{"rank": r} for r in range(world)]
    assert main_rank_first(lambda: dist.get_rank() + 5) == (5 if rank == 0 else None)
    with pytest.raises(UserError, match="key: found 1, allowed: 2"):  # alike on every rank
        main_rank_first(refuse)
    with pytest.raises(ValueError if rank == 0 else RuntimeError, match="the reason"):
        main_rank_first(break_down)
    with pytest.raises(RuntimeError, match="out of memory") as ordinary, naming("all-gather"):
        raise RuntimeError("out of memory")
    assert not isinstance(ordinary.value, CollectiveError), "a fault of one's own is not the network's"
    with (
        pytest.raises(CollectiveError, match=r"^barrier in the world group failed \(ranks \[0, 1, 2\], seen by rank"),
        naming("DeepSpeed's step"),
        naming("barrier"),
    ):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")


def test_collectives() -> None:
    run_ranks(collectives, 3)
