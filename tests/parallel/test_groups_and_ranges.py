"""What needs no second rank: vocabulary ranges, the launcher's environment, a group of one."""

import gc
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import Crew, fork_server, tell

from cqwen_dist.config import UserError
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.parallel.mappings import exchange_counts, gather_tokens, scatter_sum_tokens, sum_partials
from cqwen_dist.parallel.runtime import _free_groups, distributed, find_ranks
from cqwen_dist.parallel.vocab_parallel import vocab_range


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
