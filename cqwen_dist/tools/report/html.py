"""`cqwen report`: shows one or more runs in a self-contained HTML file."""

import json
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta, timezone
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
from pydantic_core import to_json

from cqwen_dist import __version__
from cqwen_dist.config import Said, UserError, changed_keys, reason_of
from cqwen_dist.console import echo
from cqwen_dist.run.files import METRICS, REPORT, write_atomically
from cqwen_dist.run.status import read_status
from cqwen_dist.tools.report.diagnosis import diagnose
from cqwen_dist.tools.report.run_data import RunData, read_run, watched_names

PAGE = Path(__file__).parent / "page"


def write_report(folders: Sequence[Path], out: Path) -> list[RunData]:
    """Read the runs, write the page atomically, and return the runs. Raises `UserError` if a folder is not a run."""
    try:
        runs = [read_run(folder) for folder in folders]
        page = render(runs)
    except (ArithmeticError, AttributeError, LookupError, TemplateError, TypeError, ValueError) as error:
        # The files may be a stranger's: their values need not have the types that this package writes
        found = Said(f"values that no run of this version writes ({type(error).__name__}: {reason_of(error)})")
        raise UserError("RUN", found, "a run's folder with whole files", ", ".join(map(str, folders))) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    return runs


def leave_report(run: Path) -> None:
    """On rank 0, write report.html into the run's folder and print a line about it, after the worst that it says.

    An error is only printed, as the run has already finished. A run without steps gets no report.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    if not (run / METRICS).is_file():
        echo(f"{read_status(run)['status']}: {run}")
        return
    try:
        page = run / REPORT
        (read,) = write_report([run], page)
        troubles = [f"{found.title}. {found.text}" for found in diagnose(read) if found.level == "bad"]
    except Exception as error:
        echo(f"note: no {REPORT}: {type(error).__name__}: {error}", err=True)
        return
    for trouble in troubles:
        echo(f"note: {trouble}")
    echo(f"{read_status(run)['status']}: {run}; what it learnt: {page}")


def render(runs: Sequence[RunData]) -> str:
    """The HTML page. Runs with equal names are shown by folder."""
    names = [run.name for run in runs]
    runs = [replace(run, name=str(run.folder)) if names.count(run.name) > 1 else run for run in runs]
    metrics = {name for run in runs for name in run.curves}
    parts = sections(metrics)
    charts = [chart for _, _, found in parts for chart in found]
    drawn = {name for chart in charts for name, _ in chart["series"]}
    environment = Environment(
        loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_function"] = lambda data, **_: to_json(data, inf_nan_mode="null").decode()
    environment.filters |= {"status": _status, "made_of": made_of, "diagnose": diagnose}
    environment.filters["figure"] = partial(_text, digits=4)
    environment.filters["json"] = partial(json.dumps, indent=1, ensure_ascii=False)
    return environment.get_template("report.html.j2").render(
        runs=runs,
        glance=_glance(runs),
        tiles=main_metrics(runs[0]) if len(runs) == 1 else [],
        sections=parts,
        differences=differences(runs),
        data={"runs": [_drawn(run) for run in runs], "charts": charts, "others": sorted(metrics - drawn)},
        style=(PAGE / "report.css").read_text(encoding="utf-8"),
        script=(PAGE / "report.js").read_text(encoding="utf-8"),
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )


def _drawn(run: RunData) -> dict[str, Any]:
    return {
        "name": run.name,
        "stages": [asdict(stage) for stage in run.stages],
        "curves": {
            metric: {key: value for key, value in asdict(curve).items() if value is not None}
            for metric, curve in run.curves.items()
        },
        "evaluations": run.evaluations,
        "fit": {name: run.fit.get(name) for name in ("target", "rows", "by_log", "points", "deciles")}
        if run.fit
        else None,
        "alarms": [{"step": alarm.get("step"), "kind": alarm.get("kind")} for alarm in run.alarms],
    }


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Config keys in which the runs differ, except run.dir and run.name, with each run's value as JSON."""
    changes = [changed_keys(runs[0].config, run.config, begun=False) for run in runs]
    first = {key: before for found in changes for key, before, _ in found if key not in ("run.dir", "run.name")}
    values = [{**first, **{key: now for key, _, now in found}} for found in changes]
    return [(key, [json.dumps(of_run[key], ensure_ascii=False) for of_run in values]) for key in first]


def _status(run: RunData) -> str:
    total, seconds, ranks = run.status.get("total_steps"), run.status.get("seconds"), run.environment.get("ranks")
    of_total = f" of {total:,}" if isinstance(total, int) and total != run.steps else ""
    steps = f"{run.steps:,}{of_total} steps"
    if isinstance(seconds, (int, float)):
        steps += f", {timedelta(seconds=round(seconds))}"
    parts = [str(run.status.get("status", "unknown")), steps]
    return " · ".join([*parts, f"{ranks} rank{'s' if ranks != 1 else ''}"] if ranks else parts)


def made_of(run: RunData) -> list[tuple[str, str]]:
    """(label, text) for the run's base model, data and machine."""
    model, found = run.config.model, run.environment
    base = model.name_or_path or ""
    if model.architecture is not None:
        shape = model.architecture
        made = f"pretrained for {model.pretrain.steps} steps" if model.pretrain else "with random weights"
        size = f"{shape.get('num_hidden_layers')} layers of {shape.get('hidden_size')}"
        base = f"{shape.get('model_type')}, {size}, {made}"
    train = run.config.data.train
    data = train if isinstance(train, str) else ", ".join(train)
    gpus = found.get("gpus") or []
    machine = [", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no GPU"]
    machine += [f"{found['cpus']} CPU cores"] if "cpus" in found else []
    machine += [f"torch {found['packages']['torch']}"] if "torch" in found.get("packages", {}) else []
    return [("Base", base), ("Data", data), *([("Machine of rank 0", ", ".join(machine))] if found else [])]


def _glance(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Rows in the table of final metrics: each metric, followed by the metrics to compare it with."""
    rows = []
    for metric in compared_metrics({name for run in runs for name in run.last}):
        rows.append({**metric, "values": [run.last.get(metric["name"]) for run in runs]})
        for name, label in metric.get("against", {}).items():
            rows.append({**metric, "label": f"… {label}", "best": None, "values": [run.last.get(name) for run in runs]})
    return [{"label": row["label"], "values": _cells(row)} for row in rows if {*row["values"]} != {None}]


def _cells(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The cell for each run. The best value is marked unless all are equal."""
    known = {value for value in row["values"] if value is not None}
    pick = {"larger": max, "smaller": min}.get(row.get("best") or "")
    best = pick(known) if pick is not None and len(known) > 1 else None
    return [
        {"text": _text(value, row.get("percent")), "best": best is not None and value == best}
        for value in row["values"]
    ]


def main_metrics(run: RunData) -> list[dict[str, str]]:
    """The main metrics in a run as {label, value, compared}, where `compared` is text with related metrics."""
    tiles = []
    for metric in compared_metrics([]):
        if metric["name"] in run.last and metric.get("tile") and not (metric.get("words") and run.of_table):
            others = {label: run.last[name] for name, label in metric.get("against", {}).items() if name in run.last}
            percent = metric.get("percent")
            compared = ", ".join(f"{label} {_text(value, percent)}" for label, value in others.items())
            value = _text(run.last[metric["name"]], percent)
            tiles.append({"label": metric["label"], "value": value, "compared": compared})
    return tiles


def _text(value: float | None, percent: bool | None = False, digits: int = 3) -> str:
    """A number in so many digits, and all digits before the point."""
    if value is None:
        return "–"
    if percent:
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.{digits}g}".rstrip(".")


@cache
def _described() -> dict[str, Any]:
    return yaml.safe_load((PAGE / "charts.yaml").read_text(encoding="utf-8"))


def sections(metrics: Collection[str]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(key, title, charts) for every section that has charts for these metrics. The page script reads them."""
    found = []
    for key, section in _described()["sections"].items():
        given = [*section["charts"], *(_of_watched("chart", metrics) if key == "words" else [])]
        if charts := [_chart(key, **chart) for chart in given if not chart["curves"].keys().isdisjoint(metrics)]:
            found.append((key, section["title"], charts))
    return found


def _chart(section: str, curves: dict[str, str], at: dict[float, str] | None = None, **chart: Any) -> dict[str, Any]:
    usual = {"section": section, "say": "", "log": False, "percent": False}
    return {**usual, **chart, "series": list(curves.items()), "at": list((at or {}).items())}


def compared_metrics(metrics: Iterable[str]) -> list[dict[str, Any]]:
    """The rows in the table of final metrics, from `metrics` in page/charts.yaml."""
    return [*_described()["metrics"], *_of_watched("metric", metrics)]


def _of_watched(what: str, metrics: Iterable[str]) -> list[dict[str, Any]]:
    """The chart or the metric of each `data.watch` name, from `watched` in page/charts.yaml."""
    text = json.dumps(_described()["watched"][what])
    return [json.loads(text.replace("NAME", name)) for name in watched_names(metrics)]
