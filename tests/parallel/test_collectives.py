"""Plain collectives on ranks: what they return, and how their failures read."""

import gc
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.devices import LINKS
from support.ranks import Crew, Pool, fork_server, held_port, tell
from support.stand_in_gpu import device

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
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.parallel.mappings import exchange_counts, gather_tokens, scatter_sum_tokens, sum_partials
from cqwen_dist.parallel.runtime import _free_groups, distributed, find_ranks, pick_device
from cqwen_dist.parallel.vocab_parallel import vocab_range


def refuse() -> None:
    raise UserError("key", 1, "2")


def fill_up() -> None:
    raise PermissionError(13, "full", "/run")


def break_down() -> None:
    raise ValueError("the reason")


def sums_and_gathers() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    assert sum_over(torch.tensor([1.0, float(rank)], device=device())).tolist() == [world, sum(range(world))]
    assert gather_rows(torch.tensor([rank, 7], device=device())).tolist() == [[r, 7] for r in range(world)]
    assert gather_objects({"rank": rank}) == [{"rank": r} for r in range(world)]


def test_sums_and_gathers(pool: Pool) -> None:
    pool(sums_and_gathers, 3)


@LINKS
def test_collectives_of_what_lies_on_gpus(pool: Pool, link: str) -> None:
    pool(sums_and_gathers, 2, link=link)
    pool(owners, 2, False, link=link)


def owners(scattered: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    owner = torch.arange(world, device=device()).repeat_interleave(2)  # of each row
    parts = torch.full((2 * world, 3), float(rank), device=device()) + owner[:, None]
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


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_vocab_range_is_torch_chunk(size: int) -> None:
    for v in [*range(1, 20), 101, 152_064]:
        chunks = torch.arange(v).chunk(size)
        for rank in range(size):
            start, stop = vocab_range(v, rank, size)
            expected = chunks[rank].tolist() if rank < len(chunks) else []
            assert list(range(start, stop)) == expected, (v, rank, size)


def test_finds_the_rank_under_every_launcher() -> None:
    assert find_ranks({}) == (0, 1, 0)
    assert find_ranks({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == (3, 8, 1)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "2"}
    assert find_ranks(slurm) == (5, 16, 2)
    assert find_ranks({**slurm, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == (0, 1, 0)
    assert find_ranks({"RANK": "3"}) == (0, 1, 0)  # half a launcher is none
    in_salloc = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert find_ranks(in_salloc) == (0, 1, 0)  # its shell is one process; srun's tasks would be eight
    assert find_ranks({**in_salloc, "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == (3, 8, 1)


def test_one_process_gets_a_group_of_one_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    hook = sys.excepthook
    for _ in range(2):  # a second run in the same process works, too
        with distributed() as runtime:
            assert (runtime.rank, runtime.world_size, runtime.is_main) == (0, 1, True)
            assert runtime.device == torch.device("cpu")
            groups = build_groups(1)
            assert (groups.world_size, groups.vocab_rank, groups.vocab_size) == (1, 0, 1)
            with pytest.raises(UserError, match=r"vocab_group_size: found 2, allowed: a divisor of the 1 rank: 1"):
                build_groups(2)
        assert not dist.is_initialized()
        assert "MASTER_ADDR" not in os.environ
        assert "RANK" not in os.environ
        assert sys.excepthook is hook  # torch's would name rank 0 in every later traceback


@pytest.mark.parametrize(
    "names", [("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")]
)
def test_many_ranks_without_a_master_are_refused_in_one_line(names, monkeypatch) -> None:
    """A shell inside `srun --pty` or a batch script has SLURM_NTASKS=8, and the seven others do not exist."""
    for name, value in zip((*names, "DS_ACCELERATOR"), ("0", "8", "0", "cpu"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    said = r"no MASTER_ADDR, but 8 ranks.* cqwen launch --ranks N, or `unset SLURM_NTASKS`"
    with pytest.raises(UserError, match=said), distributed():
        pass


def test_without_a_group_mappings_are_the_identity() -> None:
    rows = torch.randn(3, 2, requires_grad=True)
    assert gather_tokens(rows, [3], None) is rows
    assert scatter_sum_tokens(rows, [3], None) is rows
    assert sum_partials(rows, None) is rows
    assert exchange_counts(3, None, torch.device("cpu")) == [3]


def leave_a_group_that_is_frozen_garbage(rank: int, mouth: Connection) -> None:
    with distributed(alone=True):
        knot: list[object] = [dist.group.WORLD]
        knot.append(knot)
    del knot
    gc.freeze()  # as a verb that trains does
    _free_groups()
    names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
    tell(mouth, [name for name in names if "gloo" in name])


def test_no_thread_of_a_group_outlives_a_process_that_froze_its_garbage() -> None:
    crew = Crew(fork_server(), leave_a_group_that_is_frozen_garbage, 1)
    assert crew.hear(60) == [(0, [])]
    assert crew.end(60) == [0]


def test_a_launchers_variables_are_checked() -> None:
    for rank, said in (("x", "found 'x', allowed: a whole number"), ("2", "found 2, allowed: 0 to 1, as WORLD_SIZE")):
        with pytest.raises(UserError, match=f"RANK: {said}"):
            find_ranks({"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0"})


def test_a_host_that_does_not_resolve_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29555"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with pytest.raises(UserError, match=r"MASTER_ADDR: found 'no-such-host\.invalid', allowed: a host that resolves"):
        distributed().__enter__()
