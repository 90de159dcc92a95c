"""`cqwen fit`: one command from a table to a model that predicts a column of it, with intervals."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from cqwen_dist.cli.arguments import AsJson
from cqwen_dist.config import UserError
from cqwen_dist.report.console import plain_console, print_json, quiet_libraries


def fit(
    table: Annotated[str, typer.Argument(metavar="FILE", help="A table: .csv, .tsv, .parquet or .jsonl.")],
    target: Annotated[str, typer.Option(help="The column of numbers to predict.")],
    base: Annotated[str, typer.Option(help="A model's folder or hub name.")] = "HuggingFaceTB/SmolLM2-135M",
    text_columns: Annotated[list[str] | None, typer.Option(help="Read these columns alone; repeat it.")] = None,
    template: Annotated[str | None, typer.Option(help="The prompt of a row, columns in braces; default: all.")] = None,
    test_fraction: Annotated[float, typer.Option(help="Share of the rows to judge by.")] = 0.2,
    split: Annotated[str | None, typer.Option(help="FILE.json[#N] with the test rows' numbers from 0 instead.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the split and of training.")] = 0,
    minutes: Annotated[float, typer.Option(help="About how long it may take on this machine.")] = 20.0,
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: fits/FILE-TARGET.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict a column of a table from all others, text and numbers: train, judge, compare with what is usual."""
    if not 0 < test_fraction < 0.9:
        raise UserError("--test-fraction", test_fraction, "a share above 0 and below 0.9")
    if not minutes > 0:
        raise UserError("--minutes", minutes, "more than 0")
    folder = out or Path("fits") / f"{Path(table.partition('#')[0]).name.split('.')[0]}-{target}".replace("/", "-")
    quiet_libraries()
    from cqwen_dist.tables.fitting import FitRequest, judge, prepare

    def say(line: str) -> None:
        typer.echo(line, err=as_json)

    request = FitRequest(table, target, base, text_columns or [], template, test_fraction, split, seed, minutes)
    made = prepare(request, folder, say)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        _train(folder)
    found = judge(folder, made, say)
    if as_json:
        print_json(found)
    else:
        _show(folder, found)


def _train(folder: Path) -> None:
    """As `cqwen train` or, where this machine has several GPUs, `cqwen launch` does. Raises what they raise."""
    import torch

    from cqwen_dist.cli.runs import launch, train

    config = folder / "fit.yaml"
    if torch.cuda.device_count() < 2:
        train(config)
        return
    try:
        launch(config, ranks=torch.cuda.device_count())
    except typer.Exit as ended:
        if ended.exit_code:
            raise


def _show(folder: Path, found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{found['target']} of {found['rows']:,} rows that were held out", title_justify="left")
    for column in ("", "MAE", "RMSE", "median error", "R2", "90 % interval holds", "its median width"):
        table.add_column(column)
    for name, errors in found["results"].items():
        cells = [f"{errors[key]:.4g}" for key in ("mae", "rmse", "mdae")]
        held = f"{errors['coverage_90']:.1%}" if "coverage_90" in errors else ""
        width = f"{errors['width_90']:.4g}" if "width_90" in errors else ""
        table.add_row(name, *cells, f"{errors['r2']:.3f}", held, width)
    console = plain_console()
    console.print(table)
    for row in found["examples"]:
        console.print(" | ".join(row["prompt"].strip().splitlines()))
        interval = "no number" if row["predicted"] is None else f"90 % between {row['low_90']:g} and {row['high_90']:g}"
        console.print(f"    predicted {row['predicted']}, {interval}; true {row['truth']:g}")
    console.print(f"{folder}: fit.svg (a picture), predicted.csv, fit.yaml (cqwen train), run/report.html")
    console.print(f"more rows: cqwen predict {found['checkpoint']} FILE.csv")
