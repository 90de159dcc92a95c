"""`cqwen report`: runs side by side in one HTML file that needs nothing else, no network, no library."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cqwen_dist import __version__
from cqwen_dist.checkpoint.manifest import write_atomically
from cqwen_dist.report.diagnosis import diagnose
from cqwen_dist.report.run_data import RunData, read_run

REPORT = "report.html"
PAGE = Path(__file__).parent / "page"


@dataclass(frozen=True)
class Chart:
    """Curves in one frame. series: (figure, label), those a run does not have are left out; say: what one should see;
    log: the axis it begins with; at: (value, label) lines to compare with."""

    title: str
    series: tuple[tuple[str, str], ...]
    say: str = ""
    log: bool = False
    percent: bool = False
    at: tuple[tuple[float, str], ...] = field(default=())


LEARNING = (
    Chart("Total loss", (("train/total_loss", "training"),), "What the optimizer sees: words plus λ times numbers."),
    Chart(
        "Word loss",
        (("train/cls_loss_mean", "training"), ("eval/cls_loss_mean", "held out")),
        "One-vs-rest, summed over the vocabulary. A low loss alone does not mean a working model: see accuracy.",
        log=True,
    ),
    Chart(
        "Words right",
        (("train/accuracy", "training"), ("eval/accuracy", "held out"), ("eval/base_accuracy", "base model")),
        "argmax P over every labelled position, beside the base model's own top-1.",
        percent=True,
    ),
    Chart(
        "Perplexity, held out",
        (
            ("eval/perplexity", "softmax of loc_S"),
            ("eval/perplexity_ovr", "P / ΣP"),
            ("eval/base_perplexity", "base model"),
        ),
        "The first as the base model reads itself, the second as this model decides.",
        log=True,
    ),
    Chart(
        "Sum of all P",
        (
            ("train/prob_sum_mean", "training, mean"),
            ("dist/ovr_prob_sum_median_standard", "held out, median"),
            ("dist/ovr_prob_sum_median_causal", "for one individual"),
        ),
        "One word comes next, so 1 is calibrated.",
        log=True,
        at=((1.0, "calibrated"),),
    ),
    Chart(
        "Right, by how often training has the word",
        tuple(
            (f"eval/accuracy_words_{band}", label)
            for band, label in (
                ("1_100", "100 most frequent"),
                ("101_1000", "to 1,000"),
                ("1001_10000", "to 10,000"),
                ("10001_up", "rarer"),
                ("unseen", "unseen"),
            )
        ),
        "Held-out accuracy by the label's rank in the training texts.",
        percent=True,
    ),
    Chart(
        "Thresholds C, by how often training has the word",
        tuple(
            (f"dist/C_words_{band}", label)
            for band, label in (
                ("1_100", "100 most frequent"),
                ("101_1000", "to 1,000"),
                ("1001_10000", "to 10,000"),
                ("10001_up", "rarer"),
                ("unseen", "unseen"),
            )
        ),
        "Expected to fall for frequent words and to rise for rare ones.",
    ),
)
NUMBERS = (
    Chart(
        "Number loss",
        (("train/reg_loss_effective", "training, gated"), ("eval/reg_nll", "held out, ungated")),
        "Cauchy negative log likelihood in the target's unit.",
    ),
    Chart(
        "Absolute error, held out",
        (
            ("eval/reg_mdae", "median"),
            ("eval/reg_mae", "mean"),
            ("eval/baseline_mdae", "always the median: median"),
        ),
        "A mean far above the median: few extreme errors.",
        log=True,
    ),
    Chart(
        "Telling <NUM> from words",
        (("eval/num_precision", "precision"), ("eval/num_recall", "recall"), ("eval/num_f1", "F1")),
        "Held out.",
        percent=True,
    ),
    Chart(
        "P of <NUM> where it is right",
        (("train/p_num_mean", "training, mean"),),
        "The gate of the regression. Falling towards 0, numbers are being unlearnt.",
        percent=True,
    ),
    Chart(
        "What 90 % intervals hold",
        (
            ("eval/coverage_90", "the Cauchy's own"),
            ("eval/coverage_90_conformal", "recalibrated"),
        ),
        "Held out; the recalibrated ones on numbers that did not calibrate them.",
        percent=True,
        at=((0.9, "90 %"),),
    ),
    Chart(
        "CRPS, held out",
        (("eval/crps", "raw unit"), ("eval/crps_target", "target's unit")),
        "Smaller is better.",
        log=True,
    ),
)
INDIVIDUAL = (
    Chart(
        "Locations of U",
        (
            ("dist/U_loc_mean", "mean"),
            ("dist/U_loc_median", "median"),
            ("dist/U_loc_std", "deviation"),
            ("dist/U_loc_iqr", "quartiles apart"),
        ),
        "Mean against median: skew. Deviation against quartiles: tails.",
    ),
    Chart(
        "Scales of U",
        (
            ("dist/U_scale_mean", "mean"),
            ("dist/U_scale_median", "median"),
            ("dist/U_scale_std", "deviation"),
            ("dist/U_scale_iqr", "quartiles apart"),
        ),
        "How unsure the model is of the individual.",
        log=True,
    ),
    Chart(
        "KL from the start",
        (("train/kl", "mean"), ("train/kl_over_eps", "share beyond ε")),
        "Of U against U before training, in nats a dimension: the guard against forgetting.",
        log=True,
    ),
    Chart(
        "Drift of U's location", (("train/kl_drift", "in units of its spread"),), "Against its place before training."
    ),
)
OPTIMIZER = (
    Chart(
        "Gradient norm", (("train/grad_norm", "before clipping"),), "Over everything that trains, all ranks.", log=True
    ),
    Chart("Learning rate", (("train/lr", "of the stage"),), "Groups may have their own."),
    Chart("λ", (("train/reg_weight", "reg_weight"),), "Weight of the numbers' loss."),
    Chart("Tokens per second", (("perf/tokens_per_s", "all ranks"),), "Evaluations and checkpoints left out."),
    Chart("Seconds per step", (("perf/step_s", "whole step"), ("perf/data_wait_s", "waiting for data")), "", log=True),
    Chart(
        "Model FLOP/s used",
        (("perf/mfu", "of the peak"),),
        "Useful products of one rank over its device's peak.",
        percent=True,
    ),
    Chart(
        "Peak memory, GiB", (("perf/peak_memory_gib", "rank 0"),), "Of the allocator on a GPU, of the process on a CPU."
    ),
)
SECTIONS = (
    ("words", "Words", LEARNING),
    ("numbers", "Numbers", NUMBERS),
    ("individual", "The individual U", INDIVIDUAL),
    ("machine", "Optimizer and machine", OPTIMIZER),
)

# (label, figure, format, whether more is better; None: neither)
GLANCE: tuple[tuple[str, str, str, bool | None], ...] = (
    ("Words right", "eval/accuracy", "percent", True),
    ("… the base model's", "eval/base_accuracy", "percent", None),
    ("Perplexity (softmax of loc_S)", "eval/perplexity", "number", False),
    ("… the base model's", "eval/base_perplexity", "number", None),
    ("<NUM> F1", "eval/num_f1", "percent", True),
    ("Median absolute error", "eval/reg_mdae", "number", False),
    ("… always the median's", "eval/baseline_mdae", "number", None),
    ("Mean absolute error", "eval/reg_mae", "number", False),
    ("CRPS", "eval/crps", "number", False),
    ("90 % interval holds, raw", "eval/coverage_90", "percent", None),
    ("90 % interval holds, recalibrated", "eval/coverage_90_conformal", "percent", None),
    ("Width of it, recalibrated", "eval/width_90_conformal", "number", False),
    ("ΣP, median", "dist/ovr_prob_sum_median_standard", "number", None),
    ("KL from the start", "train/kl", "number", None),
    ("Tokens per second", "perf/tokens_per_s", "number", True),
    ("Peak memory, GiB", "perf/peak_memory_gib", "number", False),
)

# (label, figure, format, figure to compare with, its label)
TILES: tuple[tuple[str, str, str, str, str], ...] = (
    ("words right", "eval/accuracy", "percent", "eval/base_accuracy", "base model"),
    ("perplexity, P / ΣP", "eval/perplexity_ovr", "number", "eval/base_perplexity", "base model"),
    ("F1 of telling numbers from words", "eval/num_f1", "percent", "", ""),
    ("median absolute error", "eval/reg_mdae", "number", "eval/baseline_mdae", "always the median"),
    ("in the recalibrated 90 % intervals", "eval/coverage_90_conformal", "percent", "eval/coverage_90", "raw"),
    (
        "sum of all P",
        "dist/ovr_prob_sum_median_standard",
        "number",
        "dist/ovr_prob_sum_median_causal",
        "one individual",
    ),
    ("KL from the start, nats", "train/kl", "number", "", ""),
    ("tokens per second", "perf/tokens_per_s", "number", "", ""),
)


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Read the runs and write the page, whole or not at all. Raises `UserError` where a folder is no run's."""
    runs = [read_run(folder) for folder in folders]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, render(runs))
    return out


def render(runs: Sequence[RunData]) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    known = {name for _, _, charts in SECTIONS for chart in charts for name, _ in chart.series}
    names = unique_names(runs)
    return environment.get_template("report.html.j2").render(
        runs=[
            {
                "name": name,
                "folder": str(run.folder),
                "status": _status(run),
                "findings": [asdict(finding) for finding in diagnose(run)],
                "yaml": run.yaml,
                "environment": json.dumps(run.environment, indent=1, ensure_ascii=False),
                "stages": [asdict(stage) for stage in run.stages],
            }
            for name, run in zip(names, runs, strict=True)
        ],
        glance=_glance(runs),
        tiles=_tiles(runs[0]) if len(runs) == 1 else [],
        sections=[
            (key, title, [chart.title for chart in charts if _any(chart, runs)]) for key, title, charts in SECTIONS
        ],
        differences=differences(runs),
        data=_embedded(
            {
                "runs": [_drawn(name, run) for name, run in zip(names, runs, strict=True)],
                "charts": [
                    {"section": key, **asdict(chart)}
                    for key, _, charts in SECTIONS
                    for chart in charts
                    if _any(chart, runs)
                ],
                "others": sorted({name for run in runs for name in run.curves} - known),
            }
        ),
        style=(PAGE / "report.css").read_text(encoding="utf-8"),
        script=(PAGE / "report.js").read_text(encoding="utf-8"),
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )


def unique_names(runs: Sequence[RunData]) -> list[str]:
    """The runs' names; folders where two share one."""
    names = [run.name for run in runs]
    return [str(run.folder) if names.count(run.name) > 1 else run.name for run in runs]


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Config keys in which the runs differ, with each run's value; run.dir and run.name left out."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key not in ("run.dir", "run.name")]
    rows = [(key, [json.dumps(one.get(key), ensure_ascii=False) for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        return [pair for key, value in tree.items() for pair in _flat(value, f"{prefix}{key}.")]
    if isinstance(tree, list) and tree and isinstance(tree[0], dict):
        return [pair for i, value in enumerate(tree) for pair in _flat(value, f"{prefix}{i}.")]
    return [(prefix.rstrip("."), tree)]


def _any(chart: Chart, runs: Sequence[RunData]) -> bool:
    return any(name in run.curves for run in runs for name, _ in chart.series)


def _status(run: RunData) -> str:
    status = str(run.status.get("status", "unknown"))
    total = run.status.get("total_steps")
    steps = (
        f"{run.steps:,} of {total:,} steps" if isinstance(total, int) and total != run.steps else f"{run.steps:,} steps"
    )
    seconds = run.status.get("seconds")
    took = f", {_duration(float(seconds))}" if isinstance(seconds, (int, float)) else ""
    ranks = run.environment.get("ranks")
    return f"{status} · {steps}{took}" + (f" · {ranks} rank{'s' if ranks != 1 else ''}" if ranks else "")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def _glance(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Rows of the table of last figures; the best run of each is marked where there are several."""
    rows = []
    for label, name, kind, more in GLANCE:
        values = [run.last.get(name) for run in runs]
        there = [value for value in values if value is not None]
        if not there:
            continue
        best = None if more is None or len(there) < 2 or len(set(there)) == 1 else (max if more else min)(there)
        rows.append(
            {
                "label": label,
                "values": [
                    {"text": "–" if value is None else _text(value, kind), "best": best is not None and value == best}
                    for value in values
                ],
            }
        )
    return rows


def _tiles(run: RunData) -> list[dict[str, str]]:
    """The figures that matter most of a single run, each beside what it has to be compared with."""
    tiles = []
    for label, name, kind, other, other_label in TILES:
        if name in run.last:
            beside = f"{other_label} {_text(run.last[other], kind)}" if other in run.last else ""
            tiles.append({"label": label, "value": _text(run.last[name], kind), "beside": beside})
    return tiles


def _text(value: float, kind: str) -> str:
    if kind == "percent":
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _drawn(name: str, run: RunData) -> dict[str, Any]:
    """What the page's script draws of a run."""
    return {
        "name": name,
        "stages": [asdict(stage) for stage in run.stages],
        "curves": {
            figure: {key: value for key, value in asdict(curve).items() if value is not None}
            for figure, curve in run.curves.items()
        },
        "evaluations": run.evaluations,
        "alarms": [{"step": alarm.get("step"), "kind": alarm.get("kind")} for alarm in run.alarms],
        "transform": (run.config.get("loss") or {}).get("target_transform"),
    }


def _embedded(data: Any) -> str:
    """JSON that may stand inside a script element: nothing in it ends the element, nothing is not finite."""
    text = json.dumps(_finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
