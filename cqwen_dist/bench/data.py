"""`cqwen bench data`: preparing a text beside the plain Hugging Face tokenizer on the same text, in turn.

The plain tokenizer is called as its users call it (`tokenizer(texts)["input_ids"]`, a thousand texts a call), reads
nothing and writes nothing. Preparing includes reading the file, finding numbers, Arrow and the disk. CPU seconds count,
its own and its children's, so that a busy machine does little; for several workers the wall clock.
"""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cqwen_dist.config import DataConfig, UserError


def run(data: DataConfig, tokenizer: Any, rounds: int, repeat: int, workers: list[int]) -> dict[str, Any]:
    """All contenders in turn, round by round. Raises: UserError for data that cannot be read."""
    from cqwen_dist.data.chat import Chat
    from cqwen_dist.data.prepare import prepare
    from cqwen_dist.data.records import ReadReport
    from cqwen_dist.data.sources import read_train

    texts = [text.text for text in read_train(data, ReadReport(), Chat(tokenizer.tokenizer))]
    if not texts:
        raise UserError("data.train", "no usable text", "one text or more")
    with tempfile.TemporaryDirectory(prefix="cqwen-bench-") as folder:
        times: dict[str, list[tuple[float, float]]] = {}

        def plain() -> None:
            for _ in range(repeat):
                for i in range(0, len(texts), 1000):
                    tokenizer.tokenizer(texts[i : i + 1000], add_special_tokens=False)["input_ids"]

        def ours(path: Path, count: int) -> Callable[[], None]:
            def make() -> None:
                own = {"train": str(path), "eval": None, "cache_dir": f"{folder}/{time.monotonic_ns()}"}
                plan = {"workers": count, "text_field": "text", "text_template": None, "eval_fraction": 0.0}
                prepare(data.model_copy(update={**own, **plan}), tokenizer)

            return make

        path, long = Path(folder) / "texts.jsonl", Path(folder) / "long.jsonl"
        for file, copies in ((path, repeat), (long, 10 * repeat)):
            with file.open("w", encoding="utf-8") as out:
                for _ in range(copies):
                    out.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        memory = {}
        for name, file in (("once", path), ("ten times", long)):
            with _Peak() as peak:
                ours(file, 1)()
            memory[name] = {"bytes": file.stat().st_size, "peak_mib": round(peak.mib, 1)}
        contenders = {"plain tokenizer": plain, **{f"prepare, workers {n}": ours(path, n) for n in workers}}
        for _ in range(rounds):
            for name, work in contenders.items():
                cpu, wall = _cpu(), time.monotonic()
                work()
                times.setdefault(name, []).append((_cpu() - cpu, time.monotonic() - wall))
    base = times["plain tokenizer"]
    rows = [
        {
            "name": name,
            "cpu_s": statistics.median(cpu for cpu, _ in own),
            "wall_s": statistics.median(wall for _, wall in own),
            "cpu_ratio": statistics.median(cpu / b for (cpu, _), (b, _) in zip(own, base, strict=True)),
            "wall_ratio": statistics.median(wall / b for (_, wall), (_, b) in zip(own, base, strict=True)),
            "cpu_ratios": [round(cpu / b, 3) for (cpu, _), (b, _) in zip(own, base, strict=True)],
        }
        for name, own in times.items()
    ]
    return {"texts": len(texts) * repeat, "rounds": rounds, "rows": rows, "memory": memory}


def table(found: dict[str, Any]) -> Any:
    """The figures for a person."""
    from rich.console import Group
    from rich.table import Table

    shown = Table("", "CPU s", "wall s", "CPU, plain = 1", "wall, plain = 1", box=None, pad_edge=False)
    for row in found["rows"]:
        cells = (f"{row[key]:.2f}" for key in ("cpu_s", "wall_s", "cpu_ratio", "wall_ratio"))
        shown.add_row(row["name"], *cells)
    memory = [
        f"memory, {name}: {own['bytes'] / 2**20:,.1f} MiB of text, RssAnon at most {own['peak_mib']:,.0f} MiB"
        for name, own in found["memory"].items()
    ]
    return Group(f"{found['texts']:,} texts, medians of {found['rounds']} rounds", shown, *memory)


def _cpu() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


class _Peak:
    """The largest RssAnon of this process while it is open, looked at 50 times a second."""

    def __enter__(self) -> _Peak:
        self.mib = _anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.mib = max(self.mib, _anonymous())


def _anonymous() -> float:
    """RssAnon of this process in MiB (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024
