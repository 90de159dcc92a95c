"""The runs of a sweep in one job: successive halving, and the verdict.

Of N runs the worse half stops at the first evaluation after T/N steps, half of the remaining runs after 2T/N, and
so on: one run takes all T steps (Jamieson and Talwalkar, AISTATS 2016). A run that would improve later is lost.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cqwen_dist.config import Config, UserError, rises
from cqwen_dist.config.one_job import Sweep
from cqwen_dist.run.files import METRICS, read_lines
from cqwen_dist.run.folder import is_done
from cqwen_dist.run.status import read_status
from cqwen_dist.training.callbacks import TrainResult
from cqwen_dist.training.together import train_together
from cqwen_dist.training.trainer import Trainer

HALVED = "halving: "  # how the reason in a stopped run's status begins


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
        """A `Judge` (`training.together`): sees all runs before each step. Raises `UserError` for an unknown metric."""
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
    return train_together(configs, Halving(sweep.by, len(configs)) if sweep.halving else None, _ended)


def _ended(config: Config) -> bool:
    return is_done(config) or _halved(read_status(Path(config.run.dir)))


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
