"""The rank of this process, read from the launcher's environment, the run's process group, and a watchdog.

Supported launchers: `deepspeed` and `torchrun` (RANK, WORLD_SIZE, LOCAL_RANK), SLURM's srun (SLURM_PROCID,
SLURM_NTASKS, SLURM_LOCALID), or none (one process).

A collective's timeout ends the waiting ranks. It does not end the rank that hangs, and does not show where it hangs. So
each rank reports progress. After 0.9 timeouts without progress, a rank writes the stacks of all threads to
`stacks/rank-N.txt` in the run folder and exits with code 1, before the collective's timeout ends any rank. The clock is
the C thread of `faulthandler`: it also fires during a call that never returns or keeps the GIL. Just before, a Python
thread prints a line, because srun and torchrun print none. Setup may take long (a download), so until the first
report the rank only writes its stacks and continues; the report deletes them.
"""

import atexit
import faulthandler
import gc
import os
import platform
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.parallel.launcher import free_port
from cqwen_dist.parallel.stop import StopFlag
from cqwen_dist.run.files import STACKS, not_followed

SHARE = 0.9  # of the collective timeout
TOLD = 0.97  # of that time: when the rank announces that it will end
# (rank, world size, local rank) of each launcher; the first with all names set is used.
_LAUNCHERS = (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))

TIMEOUT = "CQWEN_TIMEOUT_MIN"  # minutes that a rank waits for other ranks before the run fails; 30 if unset


class HangWatch:
    """The clock of one rank; idle until `watching`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._file: Any = None
        self._last = 0.0
        self._runs, self._clock = 0, ExitStack()

    @contextmanager
    def watching(
        self, run_dir: Path, rank: int, timeout_s: float | None, say: Callable[[str], object] = lambda text: None
    ) -> Iterator[None]:
        """Inside, call `alive` at least every 0.9 timeouts, counted from its first call. None: no watch.

        say: gets a line just before a hanging rank ends. Runs of one process share the clock, with the folder of the
        first.
        """
        if not self._runs and timeout_s is not None:
            self._clock.enter_context(self._watch(run_dir, rank, timeout_s, say))
        self._runs += 1
        try:
            yield
        finally:
            self._runs -= 1
            if not self._runs:
                self._clock.close()

    @contextmanager
    def _watch(self, run_dir: Path, rank: int, timeout_s: float, say: Callable[[str], object]) -> Iterator[None]:
        path = run_dir / STACKS / f"rank-{rank}.txt"
        path.parent.mkdir(exist_ok=True)
        with open(path, "w", encoding="utf-8", opener=not_followed) as file, ExitStack() as held:
            try:
                self._file, self._seconds, self._last = file, SHARE * timeout_s, 0.0
                faulthandler.dump_traceback_later(self._seconds, file=file)
                ended = threading.Event()
                held.callback(ended.set)

                def tell() -> None:
                    while not ended.wait((1 - TOLD) / 2 * self._seconds):
                        if self._last and time.monotonic() - self._last > TOLD * self._seconds:
                            seconds = f"{TOLD * self._seconds:.0f} s"
                            say(f"rank {rank} has made no progress for {seconds} and ends; stacks: {path}")
                            return

                threading.Thread(target=tell, name="hang", daemon=True).start()
                yield
            finally:  # also if a signal stops the run: the C thread would still end the process
                faulthandler.cancel_dump_traceback_later()
                self._seconds = 0.0
                if not os.fstat(file.fileno()).st_size:
                    path.unlink(missing_ok=True)  # the folder may have been deleted meanwhile

    def alive(self) -> None:
        """Report progress and restart the clock. Cheap: it resets the clock at most a hundred times per timeout."""
        now = time.monotonic()
        if self._seconds and now - self._last > 0.01 * self._seconds:
            if not self._last:
                self._file.truncate(self._file.seek(0))
            self._last = now
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)


@dataclass(frozen=True)
class Runtime:
    """The rank of this process, its device, and the number of ranks."""

    rank: int
    world_size: int
    device: torch.device
    timeout_s: float | None = None  # of a collective
    stop: StopFlag = field(default_factory=StopFlag)
    hang: HangWatch = field(default_factory=HangWatch)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes shared files and prints."""
        return self.rank == 0


def find_ranks(env: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world size, local rank) from a launcher's environment; (0, 1, 0) without one. Raises `UserError`."""
    if names := _launcher(env):
        for name in names:
            if not env[name].isdecimal():
                raise UserError(name, env[name], "a whole number, as a launcher sets it")
        rank, world, local = (int(env[name]) for name in names)
        if rank >= world:
            raise UserError(names[0], rank, f"0 to {world - 1}, as {names[1]} is {world}")
        return rank, world, local
    return 0, 1, 0


def launched(env: Mapping[str, str]) -> bool:
    """Whether a launcher started this process. The launcher then derives its exit code from all ranks."""
    return _launcher(env) is not None


def _launcher(env: Mapping[str, str]) -> tuple[str, str, str] | None:
    # In the shell of salloc, SLURM_NTASKS counts the tasks that `srun` would start. The shell's own step has one.
    in_salloc = env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS")) != env.get("SLURM_NTASKS")
    return next((n for n in _LAUNCHERS[: 1 if in_salloc else 2] if all(name in env for name in n)), None)


def pick_device(local_rank: int) -> torch.device:
    """This rank's GPU, or the CPU without a GPU (or with DS_ACCELERATOR=cpu).

    Under SLURM each task may see a single GPU, so the index wraps. Raises `UserError` for more ranks than GPUs under
    other launchers: NCCL does not let two ranks share a GPU.
    """
    if not torch.cuda.is_available() or os.environ.get("DS_ACCELERATOR") == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if local_rank >= found and "LOCAL_RANK" in os.environ:
        ranks = f"a rank {local_rank + 1} on a machine with {found} GPU"
        raise UserError("--ranks", ranks, f"at most {found}, or DS_ACCELERATOR=cpu")
    return torch.device("cuda", local_rank % found)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch. The same seed on all ranks gives replicated parameters equal initial values."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _timeout_s() -> float:
    """Seconds that a rank waits for other ranks. Raises `UserError`."""
    given = os.environ.get(TIMEOUT, "30")
    minutes = float(given) if given.replace(".", "", 1).isdecimal() else 0.0
    if minutes == 0:
        raise UserError(TIMEOUT, given, "minutes, a number above 0")
    return 60 * minutes


@contextmanager
def distributed(timeout_s: float | None = None, stop: StopFlag | None = None, alone: bool = False) -> Iterator[Runtime]:
    """Start the process group (gloo on CPUs, nccl on GPUs), yield the `Runtime`, destroy the group. If a group exists
    already, use it.

    timeout_s: None: as `TIMEOUT` says. stop: the flag that signals set, if installed. alone: a group of one rank, even
    under a launcher. A single process also gets a group, so that all runs use the same code. Raises `UserError`.
    """
    timeout_s = _timeout_s() if timeout_s is None else timeout_s
    rank, world, local_rank = find_ranks(os.environ)
    device = pick_device(local_rank)
    if dist.is_initialized():
        if alone and dist.get_world_size() > 1:
            said = f"a process group of {dist.get_world_size()} ranks is running; call this after it has ended"
            raise UserError("ranks", Said(said), "")
        yield Runtime(dist.get_rank(), dist.get_world_size(), device, timeout_s, stop or StopFlag())
        return
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # unset, `import deepspeed` prints to stdout
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if alone:
        rank, world = 0, 1
    limit = timedelta(seconds=timeout_s)
    chosen = "gloo" if device.type == "cpu" else "nccl"
    place = local_rank if device.index is None else device.index  # DeepSpeed takes LOCAL_RANK for the GPU's number
    hook = sys.excepthook
    with nullcontext(dist.HashStore()) if alone else _meeting_place(rank, world, place, limit) as store:
        _refuse_mixed_devices(store, rank, world, device.type)
        given = device if chosen == "nccl" else None
        dist.init_process_group(chosen, store=store, rank=rank, world_size=world, timeout=limit, device_id=given)
        try:
            yield Runtime(rank, world, device, timeout_s, stop or StopFlag())
        finally:
            dist.destroy_process_group()
            if world == 1:  # torch puts "[rank0]: " before this process's tracebacks, for good
                sys.excepthook = hook


@atexit.register  # so after those who refer to a group, such as `training.zero`
def _free_groups() -> None:
    """End gloo's threads before the interpreter ends: a destroyed group keeps them as long as anything refers to it.

    Such a thread frees the tensors of the last collective. If it does so while the interpreter ends, it aborts the
    process (SIGABRT) after a successful run: https://github.com/pytorch/pytorch/pull/179291.
    """
    for _ in range(9):  # what a `__del__` held is garbage only in the next pass: 2 passes for a run
        if not gc.collect():
            with suppress(OSError):  # a thread may end meanwhile
                if not any("gloo" in file.read_text() for file in Path("/proc/self/task").glob("*/comm")):
                    return
            gc.unfreeze()  # the garbage may hang on what a verb froze


def _refuse_mixed_devices(store: Any, rank: int, world: int, device: str) -> None:
    """Raises `UserError` on all ranks if one rank has no GPU and one has: each would wait for the other."""
    store.set(f"device-{rank}", f"{device} on {platform.node()}")
    found = [value.decode() for value in store.multi_get([f"device-{each}" for each in range(world)])]
    for other, text in enumerate(found):
        if text.split()[0] != found[0].split()[0]:
            said = Said(f"{text} (rank {other}), {found[0]} (rank 0)")
            raise UserError("device", said, "a GPU for every rank, or DS_ACCELERATOR=cpu for all")


_stores: list[Any] = []  # the launcher's store, once this process has connected to it
_groups = count()


@contextmanager
def _meeting_place(rank: int, world: int, local_rank: int, timeout: timedelta) -> Iterator[Any]:
    """The rendezvous store of the ranks, with the environment variables that DeepSpeed reads.

    Under a launcher the process keeps one store and gives each group a prefix. Without it, a second group would read
    the addresses of the first from torchrun's store.
    """
    own = "MASTER_ADDR" not in os.environ
    if own:
        if world > 1:
            found = f"no MASTER_ADDR, but {world} ranks in the environment"
            allowed = "in a shell of SLURM, cqwen launch --ranks N, or `unset SLURM_NTASKS` for one process"
            raise UserError("ranks", found, f"{allowed}; MASTER_ADDR=HOST under srun")
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free_port())
    for name, value in zip(_LAUNCHERS[0], (rank, world, local_rank), strict=True):
        os.environ[name] = str(value)
    try:
        if own:
            yield dist.HashStore()
        else:
            try:  # torch would only time out
                socket.getaddrinfo(name := os.environ["MASTER_ADDR"], None)
            except OSError as error:
                here = f"a host that resolves on {platform.node()} ({error.strerror})"
                raise UserError("MASTER_ADDR", name, here) from None
            if not _stores:
                _stores.append(next(iter(dist.rendezvous("env://", rank, world, timeout=timeout)))[0])
            # The store outlives ranks that torchrun starts again. On several hosts its agents may count differently.
            start = os.environ.get("TORCHELASTIC_RESTART_COUNT") if os.environ.get("GROUP_WORLD_SIZE") == "1" else None
            yield dist.PrefixStore(f"cqwen-{start}-{next(_groups)}", _stores[0])
    finally:
        if own:
            for name in ("MASTER_ADDR", "MASTER_PORT", *_LAUNCHERS[0]):
                os.environ.pop(name, None)
