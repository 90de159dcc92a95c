"""`cqwen bench data`: preparing a text beside the plain Hugging Face tokenizer on the same text, in turn; and preparing
ten times the text with one worker and with several, in turn.

The plain tokenizer is called as its users call it (`tokenizer(texts)["input_ids"]`, a thousand texts a call), reads
nothing and writes nothing. Preparing includes reading the file, finding numbers, Arrow and the disk. CPU seconds count,
its own and its children's, so that a busy machine does little; for several workers the wall clock, on a quiet one. What
the main process alone takes beside several workers is what no further worker makes shorter.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cqwen_dist.bench.memory_watch import MemoryWatch
from cqwen_dist.config import DataConfig, UserError

_LONG = 10  # times the text, for memory and several workers


class Took(NamedTuple):
    """Seconds."""

    main: float  # CPU of this process
    workers: float  # CPU of the others
    wall: float

    @property
    def cpu(self) -> float:
        """Of all."""
        return self.main + self.workers


def texts_of(data: DataConfig, tokenizer: Any) -> list[str]:
    """The texts of data.train. Raises: UserError for data that cannot be read, or is empty."""
    from cqwen_dist.data.chat import Chat
    from cqwen_dist.data.records import ReadReport
    from cqwen_dist.data.sources import read_train

    texts = [text.text for text in read_train(data, ReadReport(), Chat(tokenizer.tokenizer))]
    if not texts:
        raise UserError("data.train", "no usable text", "one text or more")
    return texts


def plain(texts: list[str], tokenizer: Any) -> None:
    """What a tokenizer's users do."""
    for i in range(0, len(texts), 1000):
        tokenizer.tokenizer(texts[i : i + 1000], add_special_tokens=False)["input_ids"]


def run(data: DataConfig, tokenizer: Any, rounds: int, repeat: int, workers: list[int]) -> dict[str, Any]:
    """All contenders in turn, round by round. Raises: UserError for data that cannot be read."""
    from cqwen_dist.data.prepare import prepare

    texts = texts_of(data, tokenizer) * repeat
    memory: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="cqwen-bench-") as folder:

        def ours(path: Path, count: int) -> Callable[[], None]:
            def make() -> None:
                kept = {
                    key: getattr(data, key) for key in ("numbers", "numeric_targets", "on_nonfinite", "max_text_mib")
                }
                own = DataConfig(train=str(path), cache_dir=f"{folder}/{time.monotonic_ns()}", workers=count, **kept)
                with MemoryWatch(os.getpid()) as watch:
                    prepare(own, tokenizer)
                peaks = {"main_mib": watch.root_mib, "worker_mib": max(watch.worker_mib, default=0.0)}
                memory[f"{path.stem}, workers {count}"] = {"bytes": path.stat().st_size, **peaks}

            return make

        once, long = Path(folder) / "once.jsonl", Path(folder) / "ten times.jsonl"
        for file, copies in ((once, 1), (long, _LONG)):
            with file.open("w", encoding="utf-8") as out:
                for _ in range(copies):
                    out.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        first = {"plain tokenizer": lambda: plain(texts, tokenizer), "prepare, workers 1": ours(once, 1)}
        beside = _in_turn(first, rounds)
        scaling = _in_turn({f"ten times, workers {n}": ours(long, n) for n in workers}, rounds)
    rows = [*_rows(beside), *_rows(scaling)]
    return {"texts": len(texts), "rounds": rounds, "rows": rows, "memory": memory}


def _in_turn(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[Took]]:
    times: dict[str, list[Took]] = {}
    for _ in range(rounds):
        for name, work in contenders.items():
            began = time.monotonic()
            before = cpu_seconds(resource.RUSAGE_SELF), cpu_seconds(resource.RUSAGE_CHILDREN)
            work()
            after = cpu_seconds(resource.RUSAGE_SELF), cpu_seconds(resource.RUSAGE_CHILDREN)
            took = Took(after[0] - before[0], after[1] - before[1], time.monotonic() - began)
            times.setdefault(name, []).append(took)
    return times


def _rows(times: dict[str, list[Took]]) -> list[dict[str, Any]]:
    """Medians, and medians of each round's ratios to the first contender."""
    base = next(iter(times.values()))
    return [
        {
            "name": name,
            "main_cpu_s": statistics.median(took.main for took in own),
            "workers_cpu_s": statistics.median(took.workers for took in own),
            "wall_s": statistics.median(took.wall for took in own),
            "cpu_ratio": statistics.median(took.cpu / b.cpu for took, b in zip(own, base, strict=True)),
            "wall_ratio": statistics.median(took.wall / b.wall for took, b in zip(own, base, strict=True)),
            "cpu_ratios": [round(took.cpu / b.cpu, 3) for took, b in zip(own, base, strict=True)],
        }
        for name, own in times.items()
    ]


def table(found: dict[str, Any]) -> Any:
    """The measurements for a person."""
    from rich.console import Group
    from rich.table import Table

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


def cpu_seconds(who: int) -> float:
    """Of this process or of its children that have ended (`resource.RUSAGE_...`), since they began."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime
