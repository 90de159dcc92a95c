"""`cqwen bench data`: `cqwen prepare` compared with the plain tokenizer on the same text, and by number of workers.

The plain tokenizer is called as its users call it (`tokenizer(texts)["input_ids"]`, 1,000 texts a call) and neither
reads nor writes a file. Preparing includes reading, finding numbers, Arrow and writing. Ratios are of CPU seconds,
children included, which a busy machine hardly changes; several workers are compared by the wall clock of a quiet
machine, on ten times the text. The main process's share is what more workers cannot shorten.
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

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.prepare import prepare
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_train
from cqwen_dist.tools.bench.memory import MemoryWatch
from cqwen_dist.tools.bench.timing import in_turn

LONG = 10  # times the text, to compare memory and numbers of workers


class Seconds(NamedTuple):
    """Of one piece of work."""

    main: float  # CPU time of this process
    workers: float  # CPU time of its children
    wall: float

    @property
    def cpu(self) -> float:
        """CPU time of all processes."""
        return self.main + self.workers


def run(data: DataConfig, tokenizer: Any, rounds: int, repeat: int, workers: list[int]) -> dict[str, Any]:
    """Time all contenders in turn, round by round. Raises: UserError for data that cannot be read, or is empty."""
    texts = [text.text for text in read_train(data, ReadReport(), Chat(tokenizer.tokenizer))] * repeat
    if not texts:
        raise UserError("data.train", "no usable text", "one text or more")
    memory: dict[str, dict[str, float]] = {}
    kept = {key: getattr(data, key) for key in ("numbers", "numeric_targets", "on_nonfinite")}
    with tempfile.TemporaryDirectory(prefix="cqwen-bench-") as folder:

        def plain() -> None:
            for i in range(0, len(texts), 1000):
                tokenizer.tokenizer(texts[i : i + 1000], add_special_tokens=False)["input_ids"]

        def ours(path: Path, count: int) -> Callable[[], None]:
            def make() -> None:
                own = DataConfig(train=str(path), cache_dir=f"{folder}/{time.monotonic_ns()}", workers=count, **kept)
                with MemoryWatch(os.getpid()) as watch:
                    prepare(own, tokenizer)
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
    """Medians of each contender, timed in turn, and medians of its ratios to the first one within a round."""

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
    """CPU time of this process and of its children that have ended, and the wall clock."""
    main, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Seconds(main.ru_utime + main.ru_stime, children.ru_utime + children.ru_stime, time.monotonic())


def table(found: dict[str, Any]) -> Group:
    """`run`'s result for a terminal."""
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
