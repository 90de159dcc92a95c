"""Console output of rank 0: a live bar on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from cqwen_dist.config.errors import printable

_STYLES = {r"^note:": "yellow", r"^alarm\b": "bold red", r"^.* step \d+/\d+": "bold"}
_SHOWN = {  # metrics of a step
    "train/total_loss": "loss {:.4f}",
    "train/lr": "lr {:.2g}",
    "train/grad_norm": "gradient {:.2g}",
    "perf/peak_memory_gib": "{:.1f} GiB",
}
RECENT = 100  # steps that the speed is measured over, at most
SPARSER = 0.01  # least time between two lines relative to the elapsed time: a few hundred lines per run


class Progress:
    """Shows step, speed and remaining time of a run. `left_s` is for all who tell the remaining time."""

    def __init__(self, total_steps: int, start_step: int, every_s: float = 5.0, silent: bool = False) -> None:
        """every_s: least seconds between two lines. silent: print no output (on other ranks)."""
        self.console = Console(highlight=False, markup=False, emoji=False, quiet=silent)
        self.every_s = every_s
        self.left_s: float | None = None  # estimated seconds to the end of the run
        self._part, self._part_began = "", 0.0
        self._bars: Bars | None = None
        self._task = TaskID(0)
        self.begin(total_steps, start_step)

    def begin(self, total_steps: int, start_step: int) -> None:
        """Start of training: measure the speed from here."""
        self.total, self.left_s, self._stage = total_steps, None, ""
        self._began = self._shown = time.monotonic()
        self._recent = deque([(start_step, self._began, 0)], RECENT + 1)  # step, its end, tokens up to it

    def step(self, step: int, stage: str, tokens: int, record: Mapping[str, Any], force: bool = False) -> None:
        """Show a finished step. record: host metrics of this step or the previous one. force: print a line."""
        now = time.monotonic()
        if stage != self._stage or step <= self._recent[-1][0]:  # a stage has its own speed; steps may be taken again
            self._stage, self._recent = stage, deque([(step - 1, *self._recent[-1][1:])], RECENT + 1)
        self._recent.append((step, now, self._recent[-1][2] + tokens))
        first, since, before = self._recent[0]
        elapsed = max(now - since, 1e-9)
        self.left_s = (self.total - step) * elapsed / max(step - first, 1)
        parts = [form.format(record[name]) for name, form in _SHOWN.items() if name in record]
        rate = (self._recent[-1][2] - before) / elapsed
        text = "  ".join([*parts, f"{rate:,.0f} tokens/s", f"{_duration(self.left_s)} left"])
        self._bar(stage, step, self.total, text)
        if force or (not self._live and now - self._shown >= max(self.every_s, SPARSER * (now - self._began))):
            self._shown = now
            self.say(f"{stage} step {step}/{self.total}  {text}")

    def part(self, what: str, done: int, of: int) -> None:
        """Show progress and remaining time of work before or between steps."""
        now = time.monotonic()
        if what != self._part or not done:  # the same part may start again
            self._part, self._part_began = what, now
        left = f"  {_duration((of - done) * (now - self._part_began) / done)} left" if 0 < done < of else ""
        self._bar(what, done, of, left)
        if not self._live and now - self._shown >= self.every_s:
            self._shown = now
            self.say(f"  {what}" + (f" {done}/{of}" if of > 1 else "") + left)

    def say(self, text: str) -> None:
        """Print a line; its prefix decides the style. No markup, as names may contain square brackets."""
        line = Text(printable(text))
        for start, style in _STYLES.items():
            line.highlight_regex(start, style)
        self.console.print(line, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    @property
    def _live(self) -> bool:
        return self.console.is_terminal and not self.console.quiet

    def _bar(self, what: str, done: int, of: int, text: str) -> None:
        if not self._live:
            return
        if self._bars is None:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}", markup=False),
            )
            self._bars = Bars(*columns, console=self.console, refresh_per_second=2, transient=True)
            self._task = self._bars.add_task(what, text="")
            self._bars.start()
        self._bars.update(self._task, description=what, completed=done, total=of, text=text)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s"
