"""`python -m experiments`: the seeds' claims on a real base. `python -m experiments.learn` has a command of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cqwen_dist.config import UserError
from cqwen_dist.console import plain_console, print_json, quiet_libraries

OUT = Path("runs/experiments")


def experiments(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Which; default: all.")] = None,
    base: Annotated[str, typer.Option(help="The folder of a real base (`make base`).", envvar="CQWEN_BASE")] = (
        "bases/smollm2-135m"
    ),
    data: Annotated[
        str, typer.Option(help="JSONL: GSM8K's fields (question, answer), or text.", envvar="CQWEN_DATA")
    ] = "bundled:diabetes",
    out: Annotated[Path, typer.Option(help="Folder of the results; the same command continues there.")] = OUT,
    scale: Annotated[str, typer.Option(help="small (two hours on one core) or full (hours).")] = "small",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 3,
    skip: Annotated[list[str] | None, typer.Option(help="An experiment to leave out; may be repeated.")] = None,
    page: Annotated[bool, typer.Option("--page", help="Then write the tables of docs/experiments.md.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
) -> None:
    """Try the seeds' claims on a real base: uncertainty, one_vs_rest, individuals, grid, stages, forgetting,
    treatments. docs/experiments.md has the results."""
    quiet_libraries()
    from experiments.claims.page import write_page
    from experiments.claims.run import NAMES, run

    wanted = [name for name in names or NAMES if name not in (skip or [])]
    console = plain_console(stderr=as_json)
    found = run(wanted, base, data, out, scale, seeds, console.print)
    if page:
        write_page(out, wanted)
    if as_json:
        print_json(found)
    else:
        console.print(f"{', '.join(f'{out / name}.json' for name in found)}")


if __name__ == "__main__":
    try:
        typer.run(experiments)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
