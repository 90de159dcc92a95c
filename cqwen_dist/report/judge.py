"""The verbs that look at a run: eval and report. Heavy imports inside, so that --help is instant."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from cqwen_dist.config import UserError
from cqwen_dist.report.console import print_json, quiet_libraries
from cqwen_dist.report.use import AsJson, Checkpoint


def evaluate(
    checkpoint: Checkpoint,
    data: Annotated[str, typer.Option(help="JSONL file or bundled:NAME; default: the run's own held-out data.")] = "",
    base: Annotated[str, typer.Option(help="Base model to compare with; default: the run's own.")] = "",
    label_set: Annotated[
        float | None, typer.Option(help="Also predict sets: every word with P above this (0 to 1).")
    ] = None,
    reject_below: Annotated[
        float | None, typer.Option(help="Also say 'I don't know' where no word's P reaches this (0 to 1).")
    ] = None,
    micro_batch_size: Annotated[int, typer.Option(help="Texts at a time.", min=1)] = 8,
    as_json: AsJson = False,
) -> None:
    """Held-out figures of a trained model beside its base model's, by deterministic inference."""
    for key, value in (("--label-set", label_set), ("--reject-below", reject_below)):
        if value is not None and not 0 < value < 1:
            raise UserError(key, value, "a probability between 0 and 1")
    quiet_libraries()
    from cqwen_dist.train.evaluate import Decisions
    from cqwen_dist.train.evaluate_file import evaluate_checkpoint

    figures = evaluate_checkpoint(
        checkpoint, data or None, micro_batch_size, base=base or None, decisions=Decisions(label_set, reject_below)
    )
    if as_json:
        print_json(figures)
    else:
        for name, value in figures.items():
            typer.echo(f"{name:40} {value:.6g}")


def leave_report(run: Path) -> None:
    """report.html in the run's folder, by rank 0. What goes wrong here does not make a failure of a finished run."""
    if os.environ.get("RANK", "0") != "0":
        return
    from cqwen_dist.report.html import REPORT, write_report

    try:
        write_report([run], run / REPORT)
    except Exception as error:
        typer.echo(f"note: no {REPORT}: {type(error).__name__}: {error}", err=True)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, shown side by side.")],
    out: Annotated[
        Path | None, typer.Option(help="The page; default: report.html in the run, or here for several.")
    ] = None,
) -> None:
    """Curves, calibration, predictions and a diagnosis of runs as one HTML page that needs nothing else."""
    from cqwen_dist.report.diagnosis import diagnose
    from cqwen_dist.report.html import REPORT, write_report
    from cqwen_dist.report.run_data import read_run

    page = out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    typer.echo(f"report: {write_report(runs, page)}")
    for run in runs:
        for finding in diagnose(read_run(run)):
            where = f"{run}: " if len(runs) > 1 else ""
            typer.echo(f"  {finding.level:4}  {where}{finding.title}. {finding.text}")
