"""Runs of one job, and of a sweep: one base in memory, one process group, and a step of each run in turn.

Each run has its own folder, lock, seed (a step seeds what it draws), engine, schedule and log, as in a job of one run.
`training.shared` has the rest. Turns go to the run with the fewest steps, so all are at about the same step, after a
resume too. A run that fails by itself is recorded in its folder, and the job continues.

A sweep ends with a verdict. With successive halving, of N runs the worse half stops at the first evaluation after T/N
steps, half of the remaining runs after 2T/N, and so on: one run takes all T steps (Jamieson and Talwalkar, AISTATS
2016). A run that would improve later is lost.
"""

import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cqwen_dist.config import Config, UserError, reason_of, rises
from cqwen_dist.config.one_job import Sweep, refuse_apart
from cqwen_dist.parallel.collectives import KnownFailure, Stopped, agree, cause_of, from_main_rank
from cqwen_dist.parallel.groups import saving_group
from cqwen_dist.parallel.runtime import Runtime, distributed
from cqwen_dist.parallel.stop import StopFlag
from cqwen_dist.run.files import METRICS, read_lines
from cqwen_dist.run.folder import is_done
from cqwen_dist.run.status import read_status
from cqwen_dist.training.assembly import groups_of
from cqwen_dist.training.callbacks import Callback, TrainResult
from cqwen_dist.training.inputs import config_facts, refuse_accelerate
from cqwen_dist.training.shared import Shared
from cqwen_dist.training.telemetry.progress import Progress
from cqwen_dist.training.train import result_of, run_in_turns
from cqwen_dist.training.trainer import Trainer

Judge = Callable[[Mapping[int, Trainer]], None]  # sees the runs before each step, and may ask their callbacks to stop
HALVED = "halving: "  # how the reason in a stopped run's status begins


@dataclass
class _Course:
    """A run on its way."""

    config: Config
    turns: Generator[Trainer, None, dict[str, Any]]
    runtime: Runtime
    trainer: Trainer | None = None  # once it is ready
    metrics: dict[str, Any] = field(default_factory=dict)  # of the last evaluation, once it has ended

    @property
    def step(self) -> int:
        return -1 if self.trainer is None else self.trainer.place.step

    def take(self, say: Callable[[str], None]) -> bool:
        """Take a turn. Returns whether the run has ended, also by a failure of its own."""
        try:
            self.trainer = next(self.turns)
        except StopIteration as end:
            self.metrics, self.trainer = end.value, None
            return True
        except Exception as error:
            alike = self.runtime.world_size == 1 or isinstance(error, KnownFailure)  # whether all ranks are here
            if self.trainer is None or cause_of(error).passing or not alike:
                raise
            say(f"alarm failed: {self.config.run.dir}: {reason_of(error)}; the other runs go on")
            self.trainer = None
            return True
        return False


def train_together(
    configs: Sequence[Config],
    judge: Judge | None = None,
    ended: Callable[[Config], bool] = is_done,
    callbacks: Sequence[Callback] = (),
) -> list[TrainResult]:
    """Train or resume runs in one job; skips those that have ended. A failed run has the status "fatal" and its reason.
    callbacks: of every run. All ranks call it.

    Raises `UserError` if the runs cannot share a base, for a run's wrong input, and `Stopped` as `train`.
    """
    refuse_apart(configs)
    for config in configs:
        refuse_accelerate(config, os.environ)
    with StopFlag().installed() as stop, distributed(stop=stop) as runtime:
        found = together_on(configs, runtime, judge, ended, callbacks)
        return [result_of(config, metrics, runtime) for config, metrics in zip(configs, found, strict=True)]


def together_on(
    configs: Sequence[Config],
    runtime: Runtime,
    judge: Judge | None = None,
    ended: Callable[[Config], bool] = is_done,
    callbacks: Sequence[Callback] = (),
) -> list[dict[str, Any]]:
    """`train_together` in an existing process group; the metrics of each run's last evaluation, or {} if skipped."""
    for config in configs:
        agree(partial(lambda config: (None, config_facts(config)), config))
    groups, say = groups_of(configs[0], runtime), Progress(not runtime.is_main).say
    over = from_main_rank(lambda: [config.run.dir for config in configs if ended(config)])
    for folder in over:
        say(f"already ended: {folder}")
    shared = Shared(Path(configs[0].run.dir), max(len(configs) - len(over), 2))
    os.environ.setdefault("WANDB_RUN_GROUP", shared.folder.resolve().name)
    os.environ.setdefault("WANDB_REINIT", "create_new")  # or each run would end the one before
    courses = dict[int, _Course]()
    for i, config in enumerate(configs):
        if config.run.dir not in over:
            own = replace(runtime, stop=StopFlag(runtime.stop))  # a callback or a failed save stops its own run
            apart = replace(groups, saving=saving_group(runtime.timeout_s))  # runs save at the same time
            courses[i] = _Course(config, run_in_turns(config, own, apart, shared, callbacks), runtime)
    live = dict(courses)
    try:
        _to_the_end(live, judge, say)
    finally:
        for course in live.values():
            course.turns.close()
    return [courses[i].metrics if i in courses else {} for i in range(len(configs))]


def _to_the_end(live: dict[int, _Course], judge: Judge | None, say: Callable[[str], None]) -> None:
    """Let the runs take their turns. Those that are done leave `live`. Raises `Stopped` once all have stopped."""
    stopped = None
    while live:
        i = min(live, key=lambda i: (live[i].step, i))
        ready = {k: course.trainer for k, course in live.items() if course.trainer is not None}
        if judge is not None and len(ready) == len(live):
            judge(ready)
        try:
            if live[i].take(say):
                del live[i]
        except Stopped as error:
            stopped = error
            if live.pop(i).trainer is not None:
                continue
            # While a run starts, perhaps only this rank stops: no collective may follow. No run has taken a step
            for course in live.values():
                with suppress(Stopped):
                    course.turns.throw(Stopped(str(error)))
            break
    if stopped is not None:
        raise stopped


@dataclass
class Halving:
    """Stops the worse half. by: the metric. count: of all runs."""

    by: str
    count: int

    def kept(self, step: int, total: int, every: int) -> int:
        """The number of runs to continue after a step, out of `total` steps with an evaluation at each `every`."""
        halvings = math.ceil(math.log2(self.count))
        at = [math.ceil(total / 2 ** (halvings - k) / every) * every for k in range(halvings)]
        due = [-(-self.count // 2 ** (k + 1)) for k, first in enumerate(at) if first <= step < total]
        return min(due, default=self.count)

    def __call__(self, runs: Mapping[int, Trainer]) -> None:
        """A `Judge`: sees all runs before each step. Raises `UserError` for an unknown metric."""
        left = {i: trainer for i, trainer in runs.items() if trainer.callbacks.asked is None}
        if not left:
            return
        step, one = min(trainer.place.step for trainer in left.values()), next(iter(left.values()))
        if self.by not in one.place.figures:
            raise UserError("by", self.by, "a metric of an evaluation, of held-out texts (data.eval)")
        kept = self.kept(step, one.run.schedule.total_steps, one.run.config.train.eval_every)
        order = sorted(left.items(), key=lambda run: rank_of(self.by, run[1].place.figures.get(self.by, math.nan)))
        for place, (_, trainer) in enumerate(order[kept:], kept + 1):
            value = trainer.place.figures.get(self.by, math.nan)
            trainer.callbacks.ask(f"{HALVED}{self.by} {value:.4g} at step {step}, place {place} of {len(order)}")


def rank_of(metric: str, value: float) -> float:
    """Smaller is better; a value that is no number is the worst."""
    return math.inf if math.isnan(value) else -value if rises(metric) else value


def train_points(sweep: Sweep, configs: Sequence[Config]) -> list[TrainResult]:
    """Train or resume the runs of a sweep. All ranks call it. Raises as `train_together`."""
    judge = Halving(sweep.by, len(configs)) if sweep.halving else None
    return train_together(configs, judge, lambda run: is_done(run) or _halved(read_status(Path(run.run.dir))))


def _halved(status: Mapping[str, Any]) -> bool:
    return str(status.get("reason")).startswith(HALVED)


def verdict(sweep: Sweep, configs: Sequence[Config]) -> Iterator[str]:
    """A line for each run, the best first, and the winner: the best of those that halving has not stopped."""
    found = []
    for config in configs:
        folder, status = Path(config.run.dir), read_status(Path(config.run.dir))
        values = [record[sweep.by] for record in read_lines(folder / METRICS) if record.get(sweep.by) is not None]
        value, out = values[-1] if values else math.nan, _halved(status) or status["status"] == "fatal"
        found.append(((out, rank_of(sweep.by, value)), config, value, status))
    found.sort(key=lambda each: each[0])
    for _, config, value, status in found:
        reason = status.get("reason")
        ended = f"{status['status']} at step {status.get('step', 0)}" + (f" ({reason})" if reason else "")
        yield f"{config.run.dir}  {config.run.name}  {sweep.by} {value:.5g}  {ended}"
    _, config, value, _ = found[0]
    yield f"winner: {config.run.name}: {sweep.by} {value:.5g}, {config.run.dir}"
