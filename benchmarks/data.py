"""Compares `cqwen prepare` with the plain tokenizer on the same text, and by number of workers.

The plain tokenizer is called as `tokenizer(texts)["input_ids"]` with 1,000 texts per call. It neither reads nor writes
files. `cqwen prepare` also reads files, finds numbers, and builds and writes Arrow tables. Ratios use CPU seconds
including children, which other load on the machine hardly changes. Worker counts are compared by wall-clock time on ten
times the text, which needs a quiet machine. More workers cannot shorten the main process's share.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table

from benchmarks.memory import MemoryWatch
from benchmarks.timing import in_turn
from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.prepare import prepare
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_train

LONG = 10  # copies of the text, to compare memory and worker counts


class Seconds(NamedTuple):
    """Seconds for one piece of work."""

    main: float  # CPU time of this process
    workers: float  # CPU time of child processes
    wall: float

    @property
    def cpu(self) -> float:
        """CPU time of all processes."""
        return self.main + self.workers


def run(data: DataConfig, tokenizer: Any, rounds: int, repeat: int, workers: list[int]) -> dict[str, Any]:
    """Time all contenders in turn, round by round. Raises `UserError` for unreadable or empty data."""
    texts = [text.text for text in read_train(data, ReadReport(), Chat(tokenizer.tokenizer))] * repeat
    if not texts:
        raise UserError("data.train", "no usable text", "one text or more")
    memory: dict[str, dict[str, float]] = {}
    kept = {key: getattr(data, key) for key in ("numbers", "numeric_targets")}
    with tempfile.TemporaryDirectory(prefix="cqwen-bench-") as folder:

        def plain() -> None:
            for i in range(0, len(texts), 1000):
                tokenizer.tokenizer(texts[i : i + 1000], add_special_tokens=False)["input_ids"]

        def ours(path: Path, count: int) -> Callable[[], None]:
            def make() -> None:
                own = DataConfig(train=str(path), cache_dir=f"{folder}/{time.monotonic_ns()}", **kept)
                with MemoryWatch(os.getpid()) as watch:
                    prepare(own, tokenizer, workers=count)
                peaks = {"main_mib": watch.root_mib, "worker_mib": max(watch.worker_mib, default=0.0)}
                memory[f"{path.stem}, workers {count}"] = {"bytes": path.stat().st_size, **peaks}

            return make

        once, long = Path(folder) / "once.jsonl", Path(folder) / "ten times.jsonl"
        for file, copies in ((once, 1), (long, LONG)):
            with file.open("w", encoding="utf-8") as out:
                for _ in range(copies):
                    out.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        rows = _rows({"plain tokenizer": plain, "prepare, workers 1": ours(once, 1)}, rounds)
        rows += _rows({f"ten times, workers {n}": ours(long, n) for n in workers}, rounds)
    return {"texts": len(texts), "rounds": rounds, "rows": rows, "memory": memory}


def _rows(contenders: dict[str, Callable[[], None]], rounds: int) -> list[dict[str, Any]]:
    """Median seconds for each contender, timed in turn, and the median ratio to the first contender per round."""

    def timed(work: Callable[[], None]) -> Seconds:
        before = _clock()
        work()
        return Seconds(*(end - start for end, start in zip(_clock(), before, strict=True)))

    times = in_turn({name: partial(timed, work) for name, work in contenders.items()}, rounds)
    first = next(iter(times.values()))
    rows = []
    for name, own in times.items():
        cpu = [mine.cpu / other.cpu for mine, other in zip(own, first, strict=True)]
        rows.append(
            {
                "name": name,
                "main_cpu_s": median(seconds.main for seconds in own),
                "workers_cpu_s": median(seconds.workers for seconds in own),
                "wall_s": median(seconds.wall for seconds in own),
                "cpu_ratio": median(cpu),
                "wall_ratio": median(mine.wall / other.wall for mine, other in zip(own, first, strict=True)),
                "cpu_ratios": [round(ratio, 3) for ratio in cpu],
            }
        )
    return rows


def _clock() -> Seconds:
    """CPU time of this process and of finished children, and the wall clock."""
    main, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Seconds(main.ru_utime + main.ru_stime, children.ru_utime + children.ru_stime, time.monotonic())


def table(found: dict[str, Any]) -> Group:
    """The result of `run` for a terminal."""
    columns = ("CPU s", "workers'", "wall s", "CPU", "wall, first = 1")
    keys = ("main_cpu_s", "workers_cpu_s", "wall_s", "cpu_ratio", "wall_ratio")
    shown = Table("", *columns, box=None, pad_edge=False)
    for i, row in enumerate(found["rows"]):
        if i == 2:
            shown.add_section()
            shown.add_row("")
        shown.add_row(row["name"], *(f"{row[key]:.2f}" for key in keys))
    memory = [
        f"{name}: {own['bytes'] / 2**20:,.0f} MiB of text, RssAnon {own['main_mib']:,.0f} MiB, a worker's "
        f"{own['worker_mib']:,.0f}"
        for name, own in found["memory"].items()
    ]
    return Group(f"{found['texts']:,} texts, medians of {found['rounds']} rounds", shown, *memory)
