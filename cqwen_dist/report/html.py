"""`cqwen report`: one or several runs in one HTML file that needs no network and no library."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import typer
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cqwen_dist import __version__
from cqwen_dist.report.charts import GLANCE, TILES, Chart, sections, watched_names
from cqwen_dist.report.console import finite
from cqwen_dist.report.diagnosis import diagnose
from cqwen_dist.report.run_data import RunData, read_run
from cqwen_dist.run.files import METRICS, REPORT, write_atomically
from cqwen_dist.run.status import read_status

PAGE = Path(__file__).parent / "page"


def write_report(folders: Sequence[Path], out: Path, samples: int = 0) -> Path:
    """Read the runs and write the page atomically. samples: how many held-out texts each run's model continues.

    Raises `UserError` for a folder that is no run, and if samples cannot be made.
    """
    runs = [read_run(folder) for folder in folders]
    if samples:
        from cqwen_dist.report.samples import sample_texts

        for run in runs:
            run.samples = sample_texts(run.folder, run.config, samples)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, render(runs))
    return out


def leave_report(run: Path) -> None:
    """On rank 0, write report.html into the run's folder and print a line about it.

    An error here is only noted, as the run itself is done. A run that stopped before its first step has no report.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    if not (run / METRICS).is_file():
        typer.echo(f"{read_status(run)['status']}: {run}")
        return
    try:
        page = write_report([run], run / REPORT)
    except Exception as error:
        typer.echo(f"note: no {REPORT}: {type(error).__name__}: {error}", err=True)
    else:
        typer.echo(f"{read_status(run)['status']}: {run}; what it learnt: {page}")


def render(runs: Sequence[RunData]) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    parts = [
        (key, title, [chart for chart in charts if any(name in run.curves for run in runs for name, _ in chart.series)])
        for key, title, charts in sections({name for run in runs for name in run.curves})
    ]
    names = unique_names(runs)
    return environment.get_template("report.html.j2").render(
        runs=[_described(name, run) for name, run in zip(names, runs, strict=True)],
        glance=_glance(runs),
        tiles=_tiles(runs[0]) if len(runs) == 1 else [],
        sections=parts,
        differences=differences(runs),
        data=_embedded(_drawings(names, runs, parts)),
        style=(PAGE / "report.css").read_text(encoding="utf-8"),
        script=(PAGE / "report.js").read_text(encoding="utf-8"),
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )


def _described(name: str, run: RunData) -> dict[str, Any]:
    """The text about a run on the page."""
    return {
        "name": name,
        "folder": str(run.folder),
        "status": _status(run),
        "made_of": made_of(run),
        "samples": run.samples,
        "findings": diagnose(run),
        "yaml": run.yaml,
        "environment": json.dumps(run.environment, indent=1, ensure_ascii=False),
        "stages": run.stages,
    }


def _drawings(names: list[str], runs: Sequence[RunData], parts: list[tuple[str, str, list[Chart]]]) -> dict[str, Any]:
    """Input of the page's script: curves of all runs, charts, and the names of curves that are in no chart."""
    known = {name for _, _, charts in parts for chart in charts for name, _ in chart.series}
    drawn = [
        {
            "name": name,
            "stages": [asdict(stage) for stage in run.stages],
            "curves": {
                metric: {key: value for key, value in asdict(curve).items() if value is not None}
                for metric, curve in run.curves.items()
            },
            "evaluations": run.evaluations,
            "alarms": [{"step": alarm.get("step"), "kind": alarm.get("kind")} for alarm in run.alarms],
        }
        for name, run in zip(names, runs, strict=True)
    ]
    return {
        "runs": drawn,
        "charts": [{"section": key, **asdict(chart)} for key, _, charts in parts for chart in charts],
        "others": sorted({name for run in runs for name in run.curves} - known),
    }


def unique_names(runs: Sequence[RunData]) -> list[str]:
    """The runs' names; the folder for each run whose name another run has too."""
    names = [run.name for run in runs]
    return [str(run.folder) if names.count(run.name) > 1 else run.name for run in runs]


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Config keys in which the runs differ, except run.dir and run.name, with each run's value as JSON."""
    flat = [dict(_flat(run.config.model_dump(mode="json"))) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key not in ("run.dir", "run.name")]
    rows = [(key, [json.dumps(one.get(key), ensure_ascii=False) for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        return [pair for key, value in tree.items() for pair in _flat(value, f"{prefix}{key}.")]
    if isinstance(tree, list) and tree and isinstance(tree[0], dict):
        return [pair for i, value in enumerate(tree) for pair in _flat(value, f"{prefix}{i}.")]
    return [(prefix.rstrip("."), tree)]


def _status(run: RunData) -> str:
    total, seconds, ranks = run.status.get("total_steps"), run.status.get("seconds"), run.environment.get("ranks")
    steps = (
        f"{run.steps:,} of {total:,} steps" if isinstance(total, int) and total != run.steps else f"{run.steps:,} steps"
    )
    if isinstance(seconds, (int, float)):
        steps += f", {_duration(float(seconds))}"
    parts = [str(run.status.get("status", "unknown")), steps]
    return " · ".join([*parts, f"{ranks} rank{'s' if ranks != 1 else ''}"] if ranks else parts)


def made_of(run: RunData) -> list[tuple[str, str]]:
    """(label, text) for the base model, the data and the machine of a run."""
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


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def _glance(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Rows of the table of last metrics. With several runs, the best value of a row is marked."""
    rows: list[tuple[str, str, str, bool | None]] = [*GLANCE]
    for name in watched_names({name for run in runs for name in run.last}):
        rows.append((f"Words right: {name}, not trained on", f"watch/{name}/accuracy", "percent", True))
        rows.append(("… the base model's", f"watch/{name}/base_accuracy", "percent", None))
    found = []
    for label, name, kind, more in rows:
        values = [run.last.get(name) for run in runs]
        if any(value is not None for value in values):
            best = _best(values, more)
            cells = [
                {"text": "–" if value is None else _text(value, kind), "best": best is not None and value == best}
                for value in values
            ]
            found.append({"label": label, "values": cells})
    return found


def _best(values: list[float | None], more: bool | None) -> float | None:
    """The best value; None if all are equal. more: the largest value is best; None: none is."""
    known = [value for value in values if value is not None]
    if more is None or len(set(known)) < 2:
        return None
    return max(known) if more else min(known)


def _tiles(run: RunData) -> list[dict[str, str]]:
    """The main metrics of a single run, each with the metric to compare it with."""
    tiles = []
    for label, name, kind, others in TILES:
        if name in run.last:
            compared = [f"{title} {_text(run.last[other], kind)}" for other, title in others if other in run.last]
            tiles.append({"label": label, "value": _text(run.last[name], kind), "compared": ", ".join(compared)})
    return tiles


def _text(value: float, kind: str) -> str:
    if kind == "percent":
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")


def _embedded(data: Any) -> str:
    """JSON for a script element: nothing in it can end the element, and all numbers are finite."""
    text = json.dumps(finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
