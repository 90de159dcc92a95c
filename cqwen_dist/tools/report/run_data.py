"""Reads a run folder for a report: the metrics, thinned to screen resolution, and the other files."""

import json
import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from cqwen_dist.config import Config, UserError, load_config
from cqwen_dist.run import files
from cqwen_dist.run.files import read_lines, read_object

RIDGE = "eval/ridge_mdae"  # only for the quickstart's bundled data
POINTS = 400  # points per curve; a longer one becomes medians over stretches, with a band from minimum to maximum

Values = dict[str, tuple[list[float], list[float]]]  # metric -> (steps, values)


@dataclass(frozen=True)
class Curve:
    """One metric over steps. low, high: minimum and maximum per point, if a point summarises more than one step."""

    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


@dataclass
class Stretch:
    """The steps in a stage, (start, stop]."""

    name: str
    start: int
    stop: int


@dataclass
class RunData:
    """The content of a run folder. A missing file gives an empty value."""

    name: str
    folder: Path
    status: dict[str, Any]
    config: Config
    yaml: str
    environment: dict[str, Any]
    start: dict[str, Any]
    stages: list[Stretch]
    curves: dict[str, Curve]
    last: dict[str, float]  # the newest value of every metric, if it is finite
    evaluations: list[dict[str, Any]]  # oldest first
    alarms: list[dict[str, Any]]
    raw: dict[str, list[float]] = field(repr=False)  # every value of every metric, for diagnoses
    fit: dict[str, Any] = field(default_factory=dict)  # fit.json of `cqwen fit`

    @property
    def of_table(self) -> bool:
        """Whether it learns a table's column, so that its words say nothing."""
        return self.config.data.target_field is not None

    @property
    def steps(self) -> int:
        """The last logged step."""
        return self.stages[-1].stop if self.stages else 0


def read_run(folder: Path) -> RunData:
    """Read a run folder, or the folder of a fit. Raises `UserError` if it is neither."""
    if fit := read_object(folder / files.FIT):
        return replace(read_run(folder / "run"), name=folder.resolve().name, fit=fit)
    if not (folder / files.CONFIG).is_file():
        raise UserError("RUN", str(folder), "a run's folder (it holds config.yaml and metrics.jsonl)")
    config = load_config(folder / files.CONFIG, [f"run.dir={json.dumps(str(folder))}"])
    start = read_object(folder / files.START)
    values: Values = {}
    stages, newest = _read_metrics(folder / files.METRICS, values)
    if config.data.eval == "bundled:diabetes/test" and "eval/baseline_mdae" in values:
        from cqwen_dist.tools.diabetes import ridge_error

        steps, _ = values["eval/baseline_mdae"]
        values[RIDGE] = (steps, [ridge_error()] * len(steps))
    found = (read_object(path) for path in sorted((folder / files.EVALUATIONS).glob("step-*.json")))
    return RunData(
        name=config.run.name or folder.resolve().name,
        folder=folder,
        status=read_object(folder / files.STATUS),
        config=config,
        yaml=config.to_yaml(),
        environment=read_object(folder / files.ENVIRONMENT),
        start=start,
        stages=stages,
        curves={name: _curve(x, y) for name, (x, y) in values.items()},
        last={name: y[-1] for name, (_, y) in values.items() if newest.get(name, y) is not None},
        evaluations=[evaluation for evaluation in found if "step" in evaluation],
        alarms=list(_lines(folder / files.ALARMS)),
        raw={name: y for name, (_, y) in values.items()},
    )


def watched_names(metrics: Iterable[str]) -> list[str]:
    """The `data.watch` names in a run's metrics."""
    return sorted({name.split("/")[1] for name in metrics if name.startswith("watch/")})


def _read_metrics(path: Path, values: Values) -> tuple[list[Stretch], dict[str, Any]]:
    """Add every metric to `values`. Returns the stages and the last value logged under each name."""
    stages: list[Stretch] = []
    newest: dict[str, Any] = {}
    for record in _lines(path):
        newest |= record
        step, stage = record.get("step", 0), str(record.get("stage", ""))
        if not stages or stages[-1].name != stage:
            stages.append(Stretch(stage, max(step - 1, 0), step))
        stages[-1].stop = step
        for name, value in record.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if "/" in name and is_number and math.isfinite(value):
                x, y = values.setdefault(name, ([], []))
                x.append(step)
                y.append(float(value))
    return stages, newest


def _curve(x: list[float], y: list[float]) -> Curve:
    if len(x) <= POINTS:
        return Curve(x, [_short(v) for v in y])
    edges = [round(i * len(x) / POINTS) for i in range(POINTS + 1)]
    parts = [slice(a, b) for a, b in pairwise(edges)]
    return Curve(
        [x[(part.start + part.stop - 1) // 2] for part in parts],
        [_short(statistics.median(y[part])) for part in parts],
        [_short(min(y[part])) for part in parts],
        [_short(max(y[part])) for part in parts],
    )


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a JSONL file. Skips truncated lines, and lines whose step is not an integer."""
    return (record for record in read_lines(path) if isinstance(record.get("step", 0), int))
