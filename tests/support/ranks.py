"""Run a test's function on several ranks: fresh processes, gloo, one thread each.

They are forked from a server that has imported the package and done nothing else: importing takes longer than most
checks, and a fork of the test process itself would carry its threads and its random state.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support import rounding, stand_in_gpu

# Two thirds of a tiny run are imports: DeepSpeed decorates an optimizer with torch.compile, which imports inductor.
PRELOADED = [
    "torch.distributed",
    "cqwen_dist.training.trainer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "pandas",
    "peft",
    "pyarrow.parquet",
]


def fork_server() -> Any:
    """The multiprocessing context whose processes begin with the package imported."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # unset, `import deepspeed` looks for one and prints
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0, staged: str = "") -> list[Any]:
    """fn(*args) on `world` ranks with the process group up; what each returns, by rank.

    staged: "cuda": all ranks on one GPU, their collectives by way of the host (`parallel.staged`); "cpu": the same
    copies to and fro, of tensors on the CPU.

    fn is a top-level function (it is pickled by name); it may return anything that pickles. The first rank that
    raises ends all: AssertionError with its traceback. So does a run longer than `timeout` seconds, after every rank
    has said on stderr where it stands.
    """
    context = mp.get_context("spawn") if staged == "cuda" else fork_server()  # DeepSpeed looks for a GPU only once
    results = context.SimpleQueue()
    environment = {**os.environ, **({"DS_ACCELERATOR": staged} if staged else {})}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # held here: its port stays ours
    ranks = [
        context.Process(
            target=_rank, args=(fn, rank, world, store.port, results, timeout, environment, staged, args), daemon=True
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(found) < world:
            if not results.empty():
                rank, value, error = pickle.loads(results.get())
                if error is not None:
                    raise AssertionError(f"rank {rank} of {world}:\n{error}")
                found[rank] = value
            elif time.monotonic() > deadline:
                raise AssertionError(f"ranks {sorted(set(range(world)) - set(found))} not done after {timeout} s")
            elif any(p.exitcode not in (None, 0) for p in ranks) and results.empty():
                raise AssertionError(f"a rank died: exit codes {[p.exitcode for p in ranks]}")
            else:
                time.sleep(0.01)
        for process in ranks:
            process.join(10)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
    return [found[rank] for rank in range(world)]


def _rank(
    fn: Callable[..., Any],
    rank: int,
    world: int,
    port: int,
    results: Any,
    timeout: float,
    environment: dict[str, str],
    staged: str,
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()  # the server's is of when it was started
    os.environ.update(environment)
    rounding.install_if_asked()
    stand_in_gpu.install_if_asked()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 renames collectives that 2.6 has
    faulthandler.dump_traceback_later(timeout * 0.9, file=sys.__stderr__)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(_backend(staged), store=store, rank=rank, world_size=world)
        value = fn(*args)
        # As bytes: the queue would send a tensor as a handle, which is void when the rank ends before it is read
        results.put(pickle.dumps((rank, value, None)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # whatever it is, the parent tells it
        results.put(pickle.dumps((rank, None, traceback.format_exc())))


def _backend(staged: str) -> str:
    if not staged:
        return "gloo"
    from cqwen_dist.parallel import staged as module

    if staged == "cuda":
        torch.cuda.set_device(0)
    else:
        module.on_host = lambda tensor: False
    return module.BACKEND
