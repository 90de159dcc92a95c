"""What needs no second rank: vocabulary ranges, the launcher's environment, a group of one."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import Crew, Pool, fork_server, held_port, run_ranks, tell

from cqwen_dist.config import UserError
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.parallel.mappings import exchange_counts, gather_tokens, scatter_sum_tokens, sum_partials
from cqwen_dist.parallel.runtime import _free_groups, distributed, find_ranks, seed_everything
from cqwen_dist.parallel.vocab_parallel import vocab_range


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_vocab_range_is_torch_chunk(size: int) -> None:
    for v in [*range(1, 40), 101, 151_936, 152_064]:
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
def test_many_ranks_without_a_master_are_refused_in_one_line(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_seed_everything_repeats() -> None:
    seed_everything(2**33)  # numpy takes 32 bits only
    a = torch.rand(3)
    seed_everything(2**33)
    assert torch.equal(a, torch.rand(3))


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the reason")
    dist.barrier()  # rank 0 waits for a rank that never comes


def wait_for_nobody() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def test_run_ranks_reports_the_failing_ranks_traceback_and_never_hangs() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2:[\s\S]*ValueError: the reason"):
        run_ranks(fail_on_rank_one, 2)


def test_a_pool_goes_on_with_fresh_ranks_after_one_raised(pool: Pool) -> None:
    first = pool(os.getpid, 2)
    assert pool(os.getpid, 2) == first, "they stay up"
    with pytest.raises(AssertionError, match=r"rank 1 of 2:[\s\S]*in fail_on_rank_one[\s\S]*ValueError: the reason"):
        pool(fail_on_rank_one, 2)
    assert not {*pool(os.getpid, 2)} & {*first}


def say_and_leave(rank: int, mouth: Connection) -> None:
    tell(mouth, torch.full((3,), rank))


def be_killed_within_a_word(rank: int, mouth: Connection) -> None:
    os.write(mouth.fileno(), (1000).to_bytes(4, "big") + b"the first of a thousand bytes")
    os.kill(os.getpid(), signal.SIGKILL)


def test_results_outlive_their_rank_and_half_a_message_is_none() -> None:
    crew = Crew(fork_server(), say_and_leave, 2)
    for process in crew.processes:
        process.join()
    words = crew.hear(60)
    assert [rank for rank, word in words if word is not None] == [0, 1]
    assert all(torch.equal(word, torch.full((3,), rank)) for rank, word in words if word is not None)
    crew = Crew(fork_server(), be_killed_within_a_word, 1)
    assert crew.hear(60) == [(0, None)]
    assert crew.end(60) == [-signal.SIGKILL]


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


def test_a_held_port_can_be_bound_only_by_the_store() -> None:
    with held_port() as port, socket.socket() as other:
        with pytest.raises(OSError):
            other.bind(("127.0.0.1", port))
        assert dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False).port == port


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("x", "2", "0"), "RANK: found 'x', allowed: a whole number"),
        (("0", "", "0"), "WORLD_SIZE: found '', allowed: a whole number"),
        (("-1", "2", "0"), "RANK: found '-1', allowed: a whole number"),
        (("2", "2", "0"), "RANK: found 2, allowed: 0 to 1, as WORLD_SIZE is 2"),
    ],
)
def test_a_launchers_variables_are_checked(values: tuple[str, str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        find_ranks(dict(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), values, strict=True)))


def test_a_host_that_does_not_resolve_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29555"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with pytest.raises(UserError, match=r"MASTER_ADDR: found 'no-such-host\.invalid', allowed: a host that resolves"):
        distributed().__enter__()
