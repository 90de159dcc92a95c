"""Run a test's function on several ranks over gloo, one thread each: fresh processes, or a pool of them.

They are forked from a server that has imported the package and done nothing else: importing takes longer than most
checks, and a fork of the test process itself would carry its threads and its random state.
"""

import faulthandler
import gc
import os
import pickle
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support import rounding, stand_in_gpu

from cqwen_dist.parallel.groups import Groups, build_groups

MOST_RANKS = 7  # that a pool keeps up
# How ranks talk, and DeepSpeed's accelerator. "host": gloo, each tensor copied to the host and back (`support.staged`),
# here CPU tensors; "one gpu": the same between ranks that share a GPU; "nccl": a GPU for each rank.
ACCELERATOR = {"gloo": "", "host": "cpu", "one gpu": "cuda", "nccl": "cuda"}
LIMIT_S = 400.0  # for what takes seconds where nothing else runs; pytest's own limit is longer, and says less
# Two thirds of a tiny run are imports: DeepSpeed decorates an optimizer with torch.compile, which imports inductor.
PRELOADED = [
    "torch.distributed",
    "cqwen_dist.training.train",
    "cqwen_dist.cli",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "pandas",
    "peft.utils.transformers_weight_conversion",
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
    "pytest",
    "sklearn.linear_model",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
    "tests.support.warm",
]

_telling = threading.Lock()  # of the threads of a process


def fork_server() -> Any:
    """The multiprocessing context whose processes begin with the package imported."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # unset, `import deepspeed` looks for one and prints
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def starting(link: str) -> tuple[Any, dict[str, str]]:
    """The multiprocessing context and the environment of ranks that talk over `link`."""
    named = ACCELERATOR[link]
    context = mp.get_context("spawn") if named == "cuda" else fork_server()  # DeepSpeed looks for a GPU only once
    return context, {**os.environ, **({"DS_ACCELERATOR": named} if named else {})}


class Crew:
    """Processes that tell this one what they find, each by a pipe of its own.

    Of one that is killed, no half-told word is waited for, and no lock is missed, as those of a common queue would be.
    What `say` sends, each of them may receive by its pipe.
    """

    def __init__(self, context: Any, target: Callable[..., None], world: int, *args: Any) -> None:
        """target(rank, mouth, *args) in each of them; it may `tell(mouth, word)`."""
        self.processes, self._ears = [], {}
        for rank in range(world):
            ear, mouth = context.Pipe()
            process = context.Process(target=target, args=(rank, mouth, *args), daemon=True)
            process.start()
            mouth.close()  # so that nothing holds it when the process has ended
            self.processes.append(process)
            self._ears[ear] = rank

    def say(self, word: Any) -> None:
        """Send a word to all that have not ended."""
        for ear in self._ears:
            with suppress(OSError):  # it has ended since, which `hear` tells
                ear.send_bytes(pickle.dumps(word))

    def hear(self, seconds: float) -> list[tuple[int, Any]]:
        """(rank, word) of all that have told something since; waits for the first. A rank that has ended tells None."""
        words = []
        for ear in wait(list(self._ears), max(seconds, 0.0)):
            assert isinstance(ear, Connection)
            try:
                while ear.poll():
                    words.append((self._ears[ear], pickle.loads(ear.recv_bytes())))
            except (EOFError, OSError):  # the latter within a word
                words.append((self._ears.pop(ear), None))
        return words

    def end(self, patience: float = 0.0) -> list[int]:
        """Kill those that do not end within so many seconds; the exit codes."""
        for process in self.processes:
            process.join(patience)
            process.kill()
            process.join()
        return [process.exitcode for process in self.processes]


def tell(mouth: Connection, word: Any) -> None:
    """As bytes: a pipe would send a tensor as a handle, which is void when its process ends before it is read."""
    with _telling:
        mouth.send_bytes(pickle.dumps(word))


@contextmanager
def held_port() -> Iterator[int]:
    """A port for rank 0 to listen on, bound meanwhile: one that was only looked for may be somebody else's by then."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


class Ranks:
    """Ranks with the process group up, which run one function after another."""

    def __init__(self, world: int, timeout: float = LIMIT_S, link: str = "gloo", lost: int | None = None) -> None:
        """The parameters are those of `run_ranks`."""
        context, environment = starting(link)
        self._world, self._timeout, self._lost = world, timeout, lost
        # The parent holds the store, so its port stays ours.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._crew = Crew(context, _rank, world, world, self._store.port, timeout, environment, link, lost is None)

    def order(self, fn: Callable[..., Any] | None, *args: Any) -> None:
        """Have each rank run fn(*args). None: let them leave together."""
        self._deadline = time.monotonic() + self._timeout
        self._crew.say(fn and (fn, args))

    def results(self) -> list[Any]:
        """What the function returned on each rank. Where it raises on one, all ranks end."""
        found: dict[int, Any] = {} if self._lost is None else {self._lost: None}
        try:
            while missing := sorted(set(range(self._world)) - set(found)):
                words = self._crew.hear(self._deadline - time.monotonic())
                if not words and time.monotonic() > self._deadline:
                    raise AssertionError(f"ranks {missing} not done after {self._timeout} s")
                # All of them: a rank that fails since another one did may come before it
                errors = [f"rank {rank} of {self._world}:\n{word[1]}" for rank, word in words if word and word[1]]
                if errors:
                    raise AssertionError("\n".join(errors))
                found |= {rank: word[0] for rank, word in words if word}
                if any(word is None and rank not in found for rank, word in words):
                    raise AssertionError(f"a rank died: exit codes {self._crew.end(1)}")
        except BaseException:
            self._crew.end()
            raise
        return [found[rank] for rank in range(self._world)]

    def end(self) -> None:
        """Kill those that do not leave."""
        self._crew.end(10 if self._lost is None else 0)


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = LIMIT_S,
    link: str = "gloo",
    lost: int | None = None,
) -> list[Any]:
    """fn(*args) on `world` fresh ranks with the process group up; what each returns, by rank.

    link: of `ACCELERATOR`. lost: a rank of which nothing is heard (None); the others do not wait for each other then.

    fn is a top-level function (it is pickled by name); it may return anything that pickles. The first rank that
    raises ends all: AssertionError with its traceback. So does a run longer than `timeout` seconds, after every rank
    has said on stderr where it stands.
    """
    ranks = Ranks(world, timeout, link, lost)
    ranks.order(fn, *args)
    ranks.order(None)  # at once: a test may want one to be gone while others still run
    found = ranks.results()
    ranks.end()
    return found


class Pool:
    """Ranks that stay up from one test to the next, for functions that leave nothing behind in their process.

    After a function that raised, the next one gets fresh ranks.
    """

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, str], Ranks] = {}

    def __call__(self, fn: Callable[..., Any], world: int, *args: Any, link: str = "gloo") -> list[Any]:
        """As `run_ranks`."""
        ranks = self._ranks.pop((world, link), None)
        while ranks is None and sum(up for up, _ in self._ranks) + world > MOST_RANKS:
            oldest = self._ranks.pop(next(iter(self._ranks)))
            oldest.order(None)
            oldest.end()
        ranks = ranks or Ranks(world, link=link)
        ranks.order(fn, *args)
        found = ranks.results()
        self._ranks[world, link] = ranks
        return found

    def end(self) -> None:
        for ranks in self._ranks.values():
            ranks.order(None)
        for ranks in self._ranks.values():
            ranks.end()


@cache
def groups_of(size: int) -> Groups:
    """This rank's groups. A process keeps them: each takes sockets."""
    return build_groups(size)


def _rank(
    rank: int,
    pipe: Connection,
    world: int,
    port: int,
    timeout: float,
    environment: dict[str, str],
    link: str,
    together: bool,
) -> None:
    gc.freeze()  # else each collection goes through all that the server has imported: 0.3 s, and copies of its memory
    os.environ.clear()  # the server's is of when it was started
    os.environ.update(environment)
    rounding.install_if_asked()
    stand_in_gpu.install_if_asked()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 renames collectives that 2.6 has
    random = torch.get_rng_state()
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(_backend(link, rank), store=store, rank=rank, world_size=world)
        while order := pickle.loads(pipe.recv_bytes()):
            fn, args = order
            torch.set_rng_state(random)  # no test depends on those before it
            faulthandler.dump_traceback_later(timeout * 0.9, file=sys.__stderr__)
            tell(pipe, (fn(*args), None))
            faulthandler.cancel_dump_traceback_later()
        if together:
            dist.barrier()
            dist.destroy_process_group()
        else:
            time.sleep(timeout)  # a rank that leaves would end the others' waiting
    except BaseException:  # whatever it is, the parent tells it
        tell(pipe, (None, traceback.format_exc()))


def _backend(link: str, rank: int) -> str:
    if ACCELERATOR[link] == "cuda":
        torch.cuda.set_device(rank if link == "nccl" else 0)
    if link in ("gloo", "nccl"):
        return link
    from support import staged

    if link == "host":
        staged.on_host = lambda tensor: False
    return staged.BACKEND
