"""A run on the console of rank 0."""

from __future__ import annotations

import time

from rich.console import Console
from rich.text import Text

_STYLES = {r"^note:": "yellow", r"^alarm\b": "bold red", r"^.* step \d+/\d+": "bold"}


class Progress:
    """Where the run is, how fast, how long still."""

    def __init__(self, total_steps: int, start_step: int, every_s: float = 5.0, silent: bool = False) -> None:
        """silent: print nothing (the other ranks)."""
        self.console = Console(highlight=False, markup=False, emoji=False, quiet=silent)
        self.every_s = every_s
        self._part, self._part_began = "", 0.0
        self.begin(total_steps, start_step)

    def begin(self, total_steps: int, start_step: int) -> None:
        """Training begins: rates count from here."""
        self.total, self.start = total_steps, start_step
        self._began = self._shown = time.monotonic()
        self._tokens = 0

    def step(self, step: int, stage: str, tokens: int, loss: float | None, force: bool = False) -> float:
        """Count a finished step; prints at most every few seconds. Returns tokens/s over the run so far."""
        now = time.monotonic()
        self._tokens += tokens
        elapsed = max(now - self._began, 1e-9)
        rate = self._tokens / elapsed
        if force or now - self._shown >= self.every_s:
            self._shown = now
            done = step - self.start
            left = (self.total - step) * elapsed / max(done, 1)
            shown = "" if loss is None else f"  loss {loss:.4f}"
            self.say(f"{stage} step {step}/{self.total}{shown}  {rate:,.0f} tokens/s  {_duration(left)} left")
        return rate

    def part(self, what: str, done: int, of: int) -> None:
        """How far one part of the work is, with the time left of it; printed at most every few seconds."""
        now = time.monotonic()
        if what != self._part or not done:  # the same part may come again
            self._part, self._part_began = what, now
        if now - self._shown >= self.every_s:
            self._shown = now
            left = f"  {_duration((of - done) * (now - self._part_began) / done)} left" if 0 < done < of else ""
            self.say(f"  {what}" + (f" {done}/{of}" if of > 1 else "") + left)

    def say(self, text: str) -> None:
        """A line as it is: names may hold square brackets, so what is to stand out does by how a line begins."""
        line = Text(text)
        for start, style in _STYLES.items():
            line.highlight_regex(start, style)
        self.console.print(line, soft_wrap=True)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s"
