"""Progress of a run: console output of rank 0 (a live bar on a terminal, otherwise a line from time to time), and its
speed: tokens/s, seconds per step, wait for data, FLOP/s relative to the peak, peak memory."""

import resource
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from cqwen_dist.batch import Batch
from cqwen_dist.config.errors import printable

_STYLES = {r"^note:": "yellow", r"^alarm\b": "bold red", r"^.* step \d+/\d+": "bold"}
_SHOWN = {  # metrics of a step
    "train/total_loss": "loss {:.4f}",
    "train/lr": "lr {:.2g}",
    "train/grad_norm": "gradient {:.2g}",
    "perf/peak_memory_gib": "{:.1f} GiB",
}
RECENT = 100  # steps that the speed is measured over, at most
EVERY_S = 5.0  # least seconds between two lines,
SPARSER = 0.01  # and relative to the elapsed time: a few hundred lines per run


class Progress:
    """Shows step, speed and remaining time of a run. `left_s` is for all who tell the remaining time."""

    def __init__(self, silent: bool = False, name: str = "") -> None:
        """silent: print no output (on other ranks). name: in front of each line, if other runs print too."""
        self.name = name
        self.console = Console(highlight=False, markup=False, emoji=False, quiet=silent)
        self.left_s: float | None = None  # estimated seconds to the end of the run
        self._part, self._part_began = "", 0.0
        self._bars: Bars | None = None
        self._task = TaskID(0)
        self.begin(0, 0)

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
        if force or (not self._live and now - self._shown >= max(EVERY_S, SPARSER * (now - self._began))):
            self._shown = now
            self.say(f"{stage} step {step}/{self.total}  {text}")

    def part(self, what: str, done: int, of: int) -> None:
        """Show progress and remaining time of work before or between steps."""
        now = time.monotonic()
        if what != self._part or not done:  # the same part may start again
            self._part, self._part_began = what, now
        left = f"  {_duration((of - done) * (now - self._part_began) / done)} left" if 0 < done < of else ""
        self._bar(what, done, of, left)
        if not self._live and now - self._shown >= EVERY_S:
            self._shown = now
            self.say(f"  {what}" + (f" {done}/{of}" if of > 1 else "") + left)

    def say(self, text: str) -> None:
        """Print a line; its prefix decides the style. No markup, as names may contain square brackets."""
        line = Text(printable(text))
        for start, style in _STYLES.items():
            line.highlight_regex(start, style)
        self.console.print(Text(f"{printable(self.name)}  " if self.name else "") + line, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    @property
    def _live(self) -> bool:
        return self.console.is_terminal and not self.console.quiet and not self.name

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


class Clock:
    """Times the steps of this rank: call `data` when a step asks for its batches, and `work` when they are here.

    No synchronisation: a step waits for its gradient norm anyway, so the times only miss the last optimizer kernels.
    """

    def __init__(self, flops: Callable[..., Any], device: torch.device, world: int, peak: float | None = None) -> None:
        """flops: operations per token (`Work.flops`). peak: of the device, in TFLOP/s; None: unknown."""
        self.flops, self.device, self.world, self.peak = flops, device, world, peak
        self._began = self._ready = time.perf_counter()
        self._shape = (0.0, 0)

    def data(self) -> None:
        """Call when a step starts and asks for its batches."""
        self._began = time.perf_counter()

    def work(self, micro_batches: Sequence[Batch]) -> None:
        """Call when the batches are here, still on the CPU."""
        self._ready = time.perf_counter()
        # Of texts whose positions are split over ranks, this rank's share
        texts = sum(b.begun_texts * b.input_ids.numel() / sum(b.texts.lengths) for b in micro_batches)
        self._shape = (texts, sum(int(batch.label_mask.sum()) for batch in micro_batches))

    def metrics(self, tokens: int, groups: frozenset[str], cached: bool = False) -> dict[str, float]:
        """perf/... of the last step. tokens: over all ranks. groups: trained groups. cached: z came from a cache.

        FLOPs are this rank's share of the useful FLOPs, with attention at the mean text length.
        """
        seconds = max(time.perf_counter() - self._began, 1e-9)
        texts, labels = self._shape
        share = tokens // self.world
        each = self.flops(share / (texts or 1), groups, cached=cached)
        tflops = (share * each.backbone + labels * each.heads) / seconds / 1e12
        # Of this rank so far: torch's allocator on a GPU, else resident memory, which Linux counts in KiB
        on_gpu, resident = self.device.type == "cuda", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else resident
        metrics = {
            "perf/tokens_per_s": tokens / seconds,
            "perf/step_s": seconds,
            "perf/data_wait_s": self._ready - self._began,
            "perf/tflops": tflops,
            "perf/peak_memory_gib": peak / 2**30,
        }
        if self.peak is not None:
            metrics["perf/mfu"] = tflops / self.peak
        return metrics
