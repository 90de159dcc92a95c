"""Verbs for tables: fit, predict, counterfactual. Imports are local: --help is instant."""

import math
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cqwen_dist.cli.models import ABSTAIN, Device, DigitsOption, digits_of
from cqwen_dist.cli.runs import start_ranks, train_here
from cqwen_dist.config.errors import UserError, writing
from cqwen_dist.console import AsJson, Checkpoint, DecimalComma, echo, plain_console, print_json, quiet_libraries, slug
from cqwen_dist.run.files import REPORT
from cqwen_dist.run.status import read_status
from cqwen_dist.tables.fit_request import FitRequest


def fit(
    *,
    request: FitRequest,
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: fits/FILE-TARGET.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict a table column from all others, text and numbers: train, evaluate, compare with standard baselines."""
    began = time.monotonic()
    folder = out or Path("fits") / slug(f"{Path(request.table.partition('#')[0]).name.split('.')[0]}-{request.target}")
    quiet_libraries()
    import torch

    from cqwen_dist.tables.choices import fit_files
    from cqwen_dist.tables.fitting import TimeLimit, judge, only_fit, prepare
    from cqwen_dist.tools.report.html import write_report

    clock = TimeLimit(request.minutes, began)
    say = partial(echo, err=as_json)
    with only_fit(folder):
        made = prepare(request, folder, say, clock)
        first, *others = fit_files(folder, request)
        further, gpus = [str(files.config) for files in others], torch.cuda.device_count()
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            # Like `cqwen train`, or like `cqwen launch` on a machine with several GPUs
            if gpus < 2:
                train_here(first.config, further, callbacks=[clock], again="the same command")
                if (status := read_status(first.run))["status"] == "paused":
                    say(f"note: {status.get('reason')}")
            elif code := start_ranks(first.config, further, gpus, quiet=as_json):
                raise typer.Exit(code)
        found = judge(folder, made, request, say, clock)
        write_report([folder], folder / REPORT)
    if as_json:
        print_json(found)
    else:
        _show_fit(folder, found)


def predict(
    checkpoint: Checkpoint,
    table: Annotated[Path, typer.Argument(metavar="FILE", help="Table: .csv, .tsv, .parquet, .arrow, .json, .jsonl.")],
    template: Annotated[str | None, typer.Option(help="Prompt per row, 'age {age}: was'; default: the run's.")] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file to write; default: stdout.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Choose one of these texts instead; repeatable.")] = None,
    reject_below: Annotated[float, typer.Option(help="With --option: choose none if every P is below this.")] = 0.0,
    digits: DigitsOption = "auto",
    within: Annotated[
        int | None,
        typer.Option(
            min=0, help="Search this many tokens for the number; 0: it comes next. Default: 8, or 0 without --template."
        ),
    ] = None,
    abstain: Annotated[float | None, typer.Option(help=ABSTAIN + "a less sure row has intervals and no value.")] = None,
    empty: Annotated[str | None, typer.Option(help="Text for an empty cell, like data.empty_cell in training.")] = None,
    decimal_comma: DecimalComma = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 16,
    device: Device = "auto",
) -> None:
    """Predict the next number for each row of a table, with intervals, as CSV; or choose among texts."""
    if reject_below and not option:
        raise UserError("--reject-below", reject_below, "with --option")
    if option and abstain is not None:
        raise UserError("--abstain", abstain, "without --option, which has --reject-below")
    chosen_digits = digits_of(digits)
    _check_out(out)
    quiet_libraries()
    from cqwen_dist.api import predicted_rows

    settings: dict[str, Any] = {"options": option or (), "reject_below": reject_below, "digits": chosen_digits}
    settings |= {"within": within, "batch_size": batch_size, "abstain": abstain}
    say = partial(echo, err=True)
    _write(predicted_rows(checkpoint, table, template, empty, decimal_comma, device, say, **settings), out)


def counterfactual(
    checkpoint: Checkpoint,
    fact: Annotated[str, typer.Option(help="What was: a prompt; with --set a table, whose target was observed.")],
    observed: Annotated[str | None, typer.Option(help="What came after the prompt: a number, or a word.")] = None,
    what_if: Annotated[str | None, typer.Option(help="The prompt under the change.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="COLUMN=VALUE", help="The change in a table; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With --set: CSV file to write; default: stdout.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """What would have been under a changed prompt or cell, for the same individual, given what was observed."""
    if odd := next((each for each in change or () if "=" not in each), None):
        raise UserError("--set", odd, "COLUMN=VALUE")
    _check_out(out)
    quiet_libraries()
    from cqwen_dist import api

    if what_if is not None and observed is not None and not change:
        found = api.counterfactual(checkpoint, fact, observed, what_if, device=device)
        print_json(asdict(found)) if as_json else echo(str(found))
    elif change and what_if is None and observed is None:
        cells = dict(each.split("=", 1) for each in change)
        _write(api.counterfactual_rows(checkpoint, fact, cells, device=device, say=partial(echo, err=True)), out)
    else:
        allowed = "a prompt with --observed and --what-if, or a table with --set COLUMN=VALUE"
        raise UserError("--fact", fact, allowed)


def _check_out(out: Path | None) -> None:
    if out is not None and out.exists():
        raise UserError("--out", str(out), "a file that does not exist yet")


def _write(rows: Iterable[Mapping[str, Any]], out: Path | None) -> None:
    from cqwen_dist.data.text_files import write_table
    from cqwen_dist.run.files import written_whole

    if out is None:
        write_table(rows, sys.stdout)
        return
    with writing("--out", out), written_whole(out) as draft, draft.open("w", encoding="utf-8", newline="") as file:
        count = write_table(rows, file)
    echo(f"{count} rows to {out}")


USE = predict, counterfactual


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
    for kind in {"seeds", "folds"} & found.keys():
        of = [found[kind][name] for name in ("mae", "mdae")]
        shown = [plain(part, best) for each in of for part in (each["mean"], each["reach"])]
        count = len(of[0]["values"])
        console.print(f"{count} {kind}: MAE {shown[0]} +- {shown[1]}, median {shown[2]} +- {shown[3]}")
    console.print(found["verdict"])
    if found["outside"]:
        console.print(f"{found['outside']:,} rows are far outside the training range (predicted.csv, outside)")
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
