"""Plain collectives on ranks: what they return, and how their failures read."""

import os

import pytest
import torch
import torch.distributed as dist
from support.ranks import Crew, Pool, fork_server, held_port, tell

from cqwen_dist.config import UserError
from cqwen_dist.parallel import runtime
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
from cqwen_dist.parallel.runtime import distributed, pick_device


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


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")


def test_each_rank_takes_one_gpu_or_the_cpu_on_request(two_gpus, monkeypatch):
    assert [pick_device(i).index for i in (0, 1)] == [0, 1]
    with pytest.raises(UserError, match=r"--ranks.*rank 3.*2 GPU.*DS_ACCELERATOR=cpu"):  # NCCL would write a page
        pick_device(2)
    monkeypatch.delenv("LOCAL_RANK")
    assert pick_device(3).index == 1, "SLURM shows each task its own"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert pick_device(5).type == "cpu"


def test_the_backend_and_the_local_rank_given_to_deepspeed(two_gpus, monkeypatch):
    """DeepSpeed takes LOCAL_RANK for the number of a GPU, which must exist."""
    seen = []

    def begin(name, **options):
        seen.append((name, options["device_id"], os.environ["LOCAL_RANK"]))

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", begin)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 1, "DS_ACCELERATOR": "cuda"}.items():
        monkeypatch.setenv(name, str(value))
    with distributed() as runtime:
        assert runtime.device == torch.device("cuda", 1)
    assert seen == [("nccl", torch.device("cuda", 1), "1")]


def meet(rank, mouth, port):
    """How a rank ends that meets another one, of which only rank 1 has a GPU."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    runtime.pick_device = lambda local_rank: torch.device("cuda:0" if rank == 1 else "cpu")
    torch.cuda.set_device = lambda device: None
    try:
        distributed().__enter__()
    except BaseException as error:
        tell(mouth, str(error))
    mouth.recv_bytes()  # rank 0 holds the store


def test_a_rank_without_the_gpu_that_others_have_is_refused_by_name_on_all():
    with held_port() as port:
        crew = Crew(fork_server(), meet, 2, port)
        try:
            said = dict(crew.hear(60) + crew.hear(5))
        finally:
            crew.end()
    assert said.keys() == {0, 1}
    for text in said.values():
        assert text.startswith("device: found cuda on ")
        assert "(rank 1), cpu on" in text
        assert text.endswith("(rank 0), allowed: a GPU for every rank, or DS_ACCELERATOR=cpu for all")
