"""Runs that are killed: where a blow falls is drawn, dealt for real, and the run is gone on with until it is done.

A blow is a signal to one rank, some milliseconds after it came to a point of the run for the n-th time: on the way
through a step, an evaluation, a stage's begin, or a save that another thread is writing. The other rank is left alone
to find out. Ranks are processes of their own, started without the launcher, whose seconds would be most of the test.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import signal
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support import stand_in_gpu
from support.ranks import LIMIT_S, Crew, held_port, starting, tell
from support.runs import write_config

WORLD = 2
ALL = -1  # every rank
HANG = 0  # instead of a signal: the rank stays where it is
STOPPED = 75
STRUCK = "struck"
SURVIVE_S = 60.0  # how long the other rank may take to find out
# Where a blow can fall: the function that is called there, at most how often in a run, and for how many milliseconds.
POINTS: dict[str, tuple[str, str, int, float]] = {
    "step": ("cqwen_dist.training.step:Stepper", "__call__", 9, 40.0),
    "save": ("cqwen_dist.checkpoint.saving:Saver", "_write", 5, 60.0),
    "boundary": ("cqwen_dist.training.trainer:Trainer", "_enter_stage", 2, 20.0),
    "evaluation": ("cqwen_dist.training.run_parts:Training", "forward", 9, 20.0),
}
WAIT = "data"  # a wait for a batch that does not come
ELSEWHERE = {
    WAIT: ("cqwen_dist.training.trainer:Trainer", "_next", 9, 20.0),
    "figures": ("cqwen_dist.training.trainer:Trainer", "_evaluate", 4, 20.0),
    "setup": ("cqwen_dist.training.run_parts:StageLoaders", "__init__", 1, 0.0),
    "start": ("cqwen_dist.training.run_parts:Run", "at", 9, 20.0),
    "prune": ("cqwen_dist.checkpoint.saving:Saver", "_prune", 4, 10.0),
}


@dataclass(frozen=True)
class Blow:
    """A signal to `rank`, `after_ms` after it came to `point` for the `call`-th time."""

    rank: int
    point: str
    call: int
    after_ms: float
    number: int = signal.SIGKILL

    @staticmethod
    def drawn(draw: random.Random, number: int) -> Blow:
        """The n-th blow: kinds of points in turn, the rest by chance."""
        return Blow.drawn_at(draw, list(POINTS)[number % len(POINTS)])

    @staticmethod
    def drawn_at(draw: random.Random, point: str, world: int = WORLD, number: int = signal.SIGKILL) -> Blow:
        """A blow at a point, the rest by chance."""
        _, _, calls, most_ms = {**POINTS, **ELSEWHERE}[point]
        rank = 0 if point == "prune" else draw.randrange(world)  # where only rank 0 comes
        return Blow(rank, point, draw.randint(1, calls), round(draw.uniform(0, most_ms), 1), number)


@dataclass
class Ended:
    """How one command on a run ended: exit codes by rank, and seconds from the blow to the other rank's end."""

    codes: list[int]
    seconds: float
    survived_s: float | None = None
    said: list[str] = field(default_factory=list)
    struck: bool = False  # whether the blow's signal was sent

    @property
    def killed(self) -> bool:
        return -signal.SIGKILL in self.codes


def crash_config(folder: Path, **changes: Any) -> Path:
    """2 stages of 5 steps, LoRA dropout, a save every 2 steps, an evaluation every 3: points on and off each other."""
    settings = {
        "model__lora__dropout": 0.1,
        "stages__0__steps": 5,
        "stages__1__steps": 5,
        "train__checkpoint_every": 2,
        "train__eval_every": 3,
        "train__keep_checkpoints": 2,
        "train__micro_batch_size": 2,
    }
    return write_config(folder, **{**settings, **changes})


def command(config: Path, *overrides: str, blow: Blow | None = None, world: int = WORLD, link: str = "gloo") -> Ended:
    """One start of a run, with a blow or without; waits for every rank to end. link: gloo or nccl (`support.ranks`)."""
    began, died, said = time.monotonic(), None, []
    with held_port() as port:
        context, environment = starting(link)
        crew = Crew(context, _rank, world, world, port, str(config), overrides, blow, environment)
        try:
            while any(process.is_alive() for process in crew.processes):
                heard = [word for _, word in crew.hear(0.005) if word]
                said += heard
                now = time.monotonic()
                if died is None and any(process.exitcode for process in crew.processes):
                    died = now
                limit = died + SURVIVE_S if died is not None else began + LIMIT_S
                if now > limit:
                    codes = [process.exitcode for process in crew.processes]
                    for process in crew.processes:
                        if process.is_alive():
                            os.kill(process.pid, signal.SIGABRT)  # it writes its stacks to stderr
                            process.join(2)
                    raise AssertionError(f"{codes}: a rank hangs ({blow})")
        finally:
            codes = crew.end()
        ended = time.monotonic()
        said += [word for _, word in crew.hear(0) if word]
    return Ended(
        codes,
        ended - began,
        None if died is None else ended - died,
        [word for word in said if word != STRUCK],
        STRUCK in said,
    )


def _rank(
    rank: int,
    mouth: Connection,
    world: int,
    port: int,
    config: str,
    overrides: tuple[str, ...],
    blow: Blow | None,
    environment: dict[str, str],
) -> None:
    import torch

    from cqwen_dist.config import UserError, load_config
    from cqwen_dist.parallel.collectives import Stopped
    from cqwen_dist.training.train import train

    gc.freeze()  # as in `support.ranks._rank`
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["LOCAL_RANK"] = str(rank)
    stand_in_gpu.install_if_asked()
    torch.set_num_threads(1)
    faulthandler.enable(os.fdopen(os.dup(2), "w"))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if blow is not None and blow.rank in (rank, ALL):
        deal(blow, mouth)
    try:
        train(load_config(config, list(overrides)))
    except Stopped:
        os._exit(STOPPED)
    except UserError as error:
        tell(mouth, f"rank {rank}: {error}")
        os._exit(2)
    except BaseException:
        tell(mouth, f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)


def deal(blow: Blow, mouth: Connection) -> None:
    """Have this process struck at the blow's point; patches the function that is called there."""
    import importlib

    where, name, _, _ = {**POINTS, **ELSEWHERE}[blow.point]
    module, _, owner = where.partition(":")
    cls = getattr(importlib.import_module(module), owner)
    plain = getattr(cls, name)
    calls = 0

    def strike() -> None:
        tell(mouth, STRUCK)
        os.kill(os.getpid(), blow.number)

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == blow.call:
            if blow.number == HANG:
                time.sleep(100)
            if not blow.after_ms:
                strike()  # a thread that has yet to begin may be later than what it should interrupt
            else:
                timer = threading.Timer(blow.after_ms / 1000, strike)
                timer.daemon = True
                timer.start()
            if blow.point == WAIT:
                return plain(args[0], (time.sleep(100) for _ in range(1)))
        return plain(*args, **kwargs)

    setattr(cls, name, watched)


def result_of(run: Path) -> dict[str, Any]:
    """What two runs must have in common: checksums of all weights and moments, and every figure but speeds."""
    folder = run / (run / "latest").read_text().strip()
    files = json.loads((folder / "manifest.json").read_text())["files"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "checkpoint": folder.name,
        "weights": {name: record["sha256"] for name, record in files.items() if name.endswith(".safetensors")},
        "figures": [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines],
        "status": json.loads((run / "status.json").read_text())["status"],
    }
