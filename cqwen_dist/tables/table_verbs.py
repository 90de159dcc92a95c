"""`cqwen fit`. Imports are local, so that --help stays fast."""

from __future__ import annotations

import math
import shlex
import sys
import time
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cqwen_dist.config import UserError
from cqwen_dist.console import (
    AsJson,
    DecimalComma,
    echo,
    plain_console,
    print_json,
    quiet_libraries,
    slug,
)
from cqwen_dist.run.status import read_status


def fit(
    table: Annotated[str, typer.Argument(metavar="FILE", help="A table: .csv, .tsv, .parquet, .arrow, .json, .jsonl.")],
    target: Annotated[str, typer.Option(help="The column of numbers to predict.")],
    base: Annotated[str, typer.Option(help="A model's folder or hub name.")] = "HuggingFaceTB/SmolLM2-135M",
    text_columns: Annotated[list[str] | None, typer.Option(help="Read only this column; may be repeated.")] = None,
    template: Annotated[str | None, typer.Option(help="The prompt, with columns in braces; default: all.")] = None,
    test_fraction: Annotated[float, typer.Option(help="Share of test rows.")] = 0.2,
    split: Annotated[str | None, typer.Option(help="JSON file of 0-based test-row indices: FILE.json[#N].")] = None,
    test_rows: Annotated[int | None, typer.Option(min=2, help="Maximum number of test rows, drawn at random.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed for the split and for training.")] = 0,
    minutes: Annotated[float, typer.Option(help="Time limit on this machine, for all phases together.")] = 20.0,
    decimal_comma: DecimalComma = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: fits/FILE-TARGET.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict a table column from all others, text and numbers: train, evaluate, compare with standard baselines."""
    began = time.monotonic()
    if not 0 < test_fraction < 0.9:
        raise UserError("--test-fraction", test_fraction, "a share above 0 and below 0.9")
    if not minutes > 0:
        raise UserError("--minutes", minutes, "more than 0")
    folder = out or Path("fits") / slug(f"{Path(table.partition('#')[0]).name.split('.')[0]}-{target}")
    quiet_libraries()
    from cqwen_dist.tables.fitting import FitRequest, TimeLimit, judge, only_fit, prepare, without_base

    clock = TimeLimit(minutes, began)
    say = partial(echo, err=as_json)
    asked = (table, target, base, text_columns or [], template, test_fraction, split, seed, minutes, test_rows)
    with only_fit(folder):
        made = prepare(FitRequest(*asked, decimal_comma), folder, say, clock)
        alone = without_base(made, say)
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            _train_fit(folder, as_json, clock)
        found = judge(folder, made, alone, say, clock)
    if as_json:
        print_json(found)
    else:
        _show_fit(folder, found)


def _train_fit(folder: Path, as_json: bool, clock: Any) -> None:
    """Trains like `cqwen train`, or like `cqwen launch` on a machine with several GPUs. Raises their errors."""
    import torch

    from cqwen_dist.cli.runs import start_ranks, train_here

    config, gpus = folder / "fit.yaml", torch.cuda.device_count()
    if gpus < 2:
        train_here(config, callbacks=[clock], again="the same command")
        if (status := read_status(folder / "run"))["status"] == "paused":
            echo(f"note: {status.get('reason')}", err=as_json)
    elif code := start_ranks(config, [], gpus, quiet=as_json):
        raise typer.Exit(code)


def _show_fit(folder: Path, found: dict[str, Any]) -> None:
    from rich.box import SIMPLE
    from rich.table import Column, Table

    results = found["results"]
    best = results[found["best"]]["mae"]
    table = Table(
        "", *(Column(name, justify="right") for name in ("MAE", "median", "R2", "in 90 %", "width")), box=SIMPLE
    )
    for name, errors in sorted(results.items(), key=lambda of: of[1]["mae"]):
        mark = " *" if name == found["best"] else "  "
        held = f"{errors['coverage_90']:.1%}" if "coverage_90" in errors else ""
        width = plain(errors["width_90"], best) if "width_90" in errors else ""
        cells = plain(errors["mae"], best) + mark, plain(errors["mdae"], best), f"{errors['r2']:.3f}"
        table.add_row(name.replace("TF-IDF of ", ""), *cells, held, width)
    console = plain_console()
    console.print(f"{found['target']} of {found['rows']:,} rows that were held out: mean and median error")
    console.print(table)
    console.print("* the lowest error; in 90 %: how often the truth is in the 90 % interval, and its median width")
    console.print(found["verdict"])
    if found["outside"]:
        console.print(f"{found['outside']:,} rows are far outside of what was learnt (predicted.csv, outside)")
    for row in found["examples"]:
        console.print(" | ".join(row["prompt"].strip().splitlines()), no_wrap=True, overflow="ellipsis")
        ends = plain(row["low_90"], best), plain(row["high_90"], best)
        predicted, truth = plain(float(row["predicted"]), best), plain(row["truth"], best)
        console.print(f"    predicted {predicted}, 90 % between {ends[0]} and {ends[1]}; true {truth}")
    console.print(f"{folder}: report.html, predicted.csv, fit.yaml (cqwen train)")
    console.print(f"more rows: cqwen predict {shlex.quote(str(folder))} FILE")


def plain(value: float, error: float) -> str:
    """A number with as many decimals as four digits of the error have: 24,356 or 13.12."""
    decimals = max(3 - math.floor(math.log10(error)), 0) if error > 0 else 3
    return f"{round(value, decimals) + 0.0:,.{decimals}f}" if decimals < 8 else f"{value:.4g}"  # + 0.0: no -0
