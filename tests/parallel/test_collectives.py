"""Plain collectives on ranks: what they return, and how their failures read."""

import pytest
import torch
import torch.distributed as dist
from support.ranks import Pool

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


def fill_up() -> None:
    raise PermissionError(13, "full", "/run")


def break_down() -> None:
    raise ValueError("the reason")


def sums_and_gathers() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    assert sum_over(torch.tensor([1.0, float(rank)])).tolist() == [world, sum(range(world))]
    assert gather_rows(torch.tensor([rank, 7])).tolist() == [[r, 7] for r in range(world)]
    assert gather_objects({"rank": rank}) == [{"rank": r} for r in range(world)]


def test_sums_and_gathers(pool: Pool) -> None:
    pool(sums_and_gathers, 3)


def owners(scattered: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    owner = torch.arange(world).repeat_interleave(2)  # of each row
    parts = torch.full((2 * world, 3), float(rank)) + owner[:, None]
    if scattered:  # as on a GPU; it writes into its input
        reduce_scatter_into(parts.chunk(world)[rank], parts, dist.group.WORLD)
    else:
        sum_to_owners(parts, dist.group.WORLD)
    summed = sum(range(world)) + world * owner[:, None].float().expand(-1, 3)
    assert torch.equal(parts[owner == rank], summed[owner == rank])
    parts[owner != rank] = torch.nan
    gather_from_owners(parts, dist.group.WORLD)
    assert torch.equal(parts, summed)


@pytest.mark.parametrize("scattered", [False, True])
def test_owners_get_sums_and_send_their_rows(pool: Pool, scattered: bool) -> None:
    pool(owners, 3, scattered)


def main_rank() -> None:
    rank = dist.get_rank()
    assert main_rank_first(lambda: dist.get_rank() + 5) == (5 if rank == 0 else None)
    with pytest.raises(UserError, match="key: found 1, allowed: 2"):  # alike on every rank
        main_rank_first(refuse)
    with pytest.raises(PermissionError, match="full") as met:  # so that each can say that it is the disk
        main_rank_first(fill_up)
    assert (met.value.errno, met.value.filename) == (13, "/run")
    with pytest.raises(ValueError if rank == 0 else RuntimeError, match="the reason"):
        main_rank_first(break_down)


def test_all_ranks_learn_what_rank_0_raised(pool: Pool) -> None:
    pool(main_rank, 3)


def names() -> None:
    with pytest.raises(RuntimeError, match="out of memory") as ordinary, naming("all-gather"):
        raise RuntimeError("out of memory")
    assert not isinstance(ordinary.value, CollectiveError), "not a fault of the network"
    with (
        pytest.raises(CollectiveError, match=r"^barrier in the world group failed \(ranks \[0, 1, 2\], seen by rank"),
        naming("DeepSpeed's step"),
        naming("barrier"),
    ):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")


def test_a_lost_connection_names_the_collective_and_its_ranks(pool: Pool) -> None:
    pool(names, 3)
