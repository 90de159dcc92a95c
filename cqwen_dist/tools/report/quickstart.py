"""The end of `cqwen quickstart`: read the metrics, export, generate, compare."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from cqwen_dist.checkpoint.manifest import latest_checkpoint
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import load_config
from cqwen_dist.console import plain_console
from cqwen_dist.generate.continuation import continue_text
from cqwen_dist.run.files import STATE
from cqwen_dist.tools.diabetes import diabetes_texts, ridge_error
from cqwen_dist.tools.export.export import export
from cqwen_dist.tools.report.html import main_metrics
from cqwen_dist.tools.report.run_data import read_run
from cqwen_dist.training.evaluation.number_metrics import CALIBRATION


def show(config_path: Path, overrides: Sequence[str], as_json: bool) -> dict[str, Any]:
    """Export, generate for held-out patients and print the results, with as_json to stderr. Returns the metrics."""
    config = load_config(config_path, list(overrides))
    run = Path(config.run.dir)
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None, "a run that was trained has a checkpoint"
    evaluated = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["figures"]
    out = run / "export"
    shutil.rmtree(out, ignore_errors=True)
    export(run, out)
    model, tokenizer = load_trained(out)

    console = plain_console(stderr=as_json)
    title = "What it learned (100 held-out patients)"
    table = Table("", "this model", "compared with", title=title, title_justify="left")
    for metric in main_metrics(read_run(run)):
        table.add_row(metric["label"], metric["value"], metric["compared"])
    console.print(table)

    title, columns = "Generated from the exported folder (mode standard)", ("generated", "90 % interval", "truth")
    shown = Table("prompt ends with", *columns, title=title, title_justify="left")
    for text in diabetes_texts("test")[:3]:
        prompt, _, truth = text.rpartition(" was ")
        (written,) = continue_text(model, tokenizer, [prompt + " was"], max_new_tokens=4)
        interval = "{:.0f} to {:.0f}".format(*written.numbers[0].intervals["0.9"]) if written.numbers else ""
        shown.add_row("..." + prompt[-32:] + " was", written.text.strip(), interval, truth)
    console.print(shown)
    console.print(f"run: {run}   exported model: {out}")
    return {**{name: value for name, value in evaluated.items() if name != CALIBRATION}, "ridge_mdae": ridge_error()}
