"""The charts and the metrics table in a report, from page/charts.yaml and for each `data.watch` entry."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

PAGE = Path(__file__).parent / "page"
RIDGE = "eval/ridge_mdae"  # only for the quickstart's bundled data


@cache
def _described() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((PAGE / "charts.yaml").read_text(encoding="utf-8"))
    return found


def watched_names(metrics: Iterable[str]) -> list[str]:
    """The `data.watch` names in a run's metrics."""
    return sorted({name.split("/")[1] for name in metrics if name.startswith("watch/")})


def sections(metrics: Collection[str]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(key, title, charts) for every section that has charts for these metrics. The page script reads them."""
    watched = [
        {
            "title": f"Kept: {name}",
            "unit": "Share of tokens",
            "percent": True,
            "curves": {f"watch/{name}/accuracy": "right", f"watch/{name}/base_accuracy": "base model"},
            "say": "Words right in texts that are not trained on. A falling curve means forgetting.",
        }
        for name in watched_names(metrics)
    ]
    found = []
    for key, section in _described()["sections"].items():
        given = [*section["charts"], *(watched if key == "words" else [])]
        if charts := [_chart(key, **chart) for chart in given if not chart["curves"].keys().isdisjoint(metrics)]:
            found.append((key, section["title"], charts))
    return found


def _chart(section: str, curves: dict[str, str], at: dict[float, str] | None = None, **chart: Any) -> dict[str, Any]:
    usual = {"section": section, "say": "", "log": False, "percent": False}
    return {**usual, **chart, "series": list(curves.items()), "at": list((at or {}).items())}


def compared_metrics(metrics: Iterable[str]) -> list[dict[str, Any]]:
    """The rows in the table of final metrics, from `metrics` in page/charts.yaml."""
    watched = [
        {
            "name": f"watch/{name}/accuracy",
            "label": f"Words right: {name}, not trained on",
            "percent": True,
            "best": "larger",
            "against": {f"watch/{name}/base_accuracy": "base model"},
        }
        for name in watched_names(metrics)
    ]
    return [*_described()["metrics"], *watched]
