"""Many small trainings side by side: lanes are processes that take tasks from one list, in order.

A small model leaves most of a GPU and all but one core idle, so lanes share them. Each result is written when its task
ends, under the task's name. A task whose result exists is skipped.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cqwen_dist.parallel.runtime import Runtime, distributed
from cqwen_dist.run.files import write_atomically

Work = Callable[..., dict[str, Any]]  # (options of the task, runtime) -> metrics


@dataclass(frozen=True)
class Task:
    """One piece of work for a lane."""

    name: str
    kind: str
    options: dict[str, Any]


def run_tasks(
    tasks: list[Task], kinds: dict[str, Work], out: Path, lanes: int, seconds: float, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Do the tasks; returns the results by name of those that ended within `seconds`.

    kinds: top-level functions by `Task.kind`. A task that fails has a result with `error`. After `seconds` the lanes
    are killed and the missing tasks are named.
    """
    results = out / "results"
    results.mkdir(parents=True, exist_ok=True)
    left = [task for task in tasks if _read(results, task.name) is None]
    if left:
        context = multiprocessing.get_context("spawn")
        turn = context.Value("i", 0)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        lanes = min(lanes, len(left))
        arguments = (left, kinds, out, turn)
        processes = [context.Process(target=_lane, args=(*arguments, lane), daemon=True) for lane in range(lanes)]
        for process in processes:
            process.start()
        _wait(processes, left, results, time.monotonic() + seconds, say)
    return {task.name: found for task in tasks if (found := _read(results, task.name)) is not None}


def _wait(processes: list[Any], left: list[Task], results: Path, deadline: float, say: Callable[[str], None]) -> None:
    seen: set[str] = set()
    while True:
        alive = any(process.is_alive() for process in processes)
        for task in left:
            result = None if task.name in seen else _read(results, task.name)
            if result is not None:
                seen.add(task.name)
                outcome = f"failed: {result['error'].strip().splitlines()[-1]}" if "error" in result else "done"
                say(f"[{len(seen)}/{len(left)}] {task.name}: {outcome}, {result['seconds']:.0f} s")
        if not alive or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    missing = [task.name for task in left if task.name not in seen]
    if missing:
        say(f"not done: {', '.join(missing)}")


def _lane(tasks: list[Task], kinds: dict[str, Work], out: Path, turn: Any, lane: int) -> None:
    """Do the next task until none is left; output goes to lane-N.log."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    log = (out / f"lane-{lane}.log").open("a", buffering=1, encoding="utf-8")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    with redirect_stdout(log), distributed() as runtime:
        while True:
            with turn.get_lock():
                index, turn.value = turn.value, turn.value + 1
            if index >= len(tasks):
                return
            _do(tasks[index], kinds, out, runtime)


def _do(task: Task, kinds: dict[str, Work], out: Path, runtime: Runtime) -> None:
    results = out / "results"
    began = time.monotonic()
    try:
        result = kinds[task.kind](task.options, runtime)
    except Exception:  # the other tasks continue
        result = {"error": traceback.format_exc()}
    record = {**result, "seconds": time.monotonic() - began}
    write_atomically(results / f"{task.name}.json", json.dumps(record))
    gc.collect()
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()


def _read(results: Path, name: str) -> dict[str, Any] | None:
    try:
        return dict(json.loads((results / f"{name}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
