"""The command line of `python -m experiments.learn`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cqwen_dist.config import UserError
from cqwen_dist.console import AsJson, plain_console, print_document, quiet_libraries


def learn(
    base: Annotated[str, typer.Option(help="The folder of a real base, such as `make base` makes.")],
    data: Annotated[str, typer.Option(help="JSONL: GSM8K's fields (question, answer), or text.")],
    out: Annotated[Path, typer.Option(help="Folder of the results; the same command continues there.")] = Path(
        "runs/learn"
    ),
    scale: Annotated[str, typer.Option(help="small (an hour on 2 cores) or full (a GPU).")] = "small",
    lanes: Annotated[int | None, typer.Option(min=1, help="Trainings side by side; default: by the cores.")] = None,
    minutes: Annotated[float, typer.Option(help="Stop after so many minutes; finished trainings stay.")] = 60.0,
    only: Annotated[list[str] | None, typer.Option(help="Only arms whose names match; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of every arm; give each seed its own --out.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare CausalQwen with ordinary LoRA on one base and your texts: words, numbers, and prose and code."""
    quiet_libraries()
    from experiments.learn.compare import run, table

    console = plain_console(stderr=as_json)
    summary = run(
        base, data, out=out, scale=scale, lanes=lanes, minutes=minutes, only=only, seed=seed, say=console.print
    )
    print_document(summary, as_json, table)


if __name__ == "__main__":
    try:
        typer.run(learn)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
