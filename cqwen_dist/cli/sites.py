"""Verbs about machines: plan, doctor, accept. Imports are local: --help is instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cqwen_dist.config.errors import UserError
from cqwen_dist.console import (
    AsJson,
    ConfigFile,
    Overrides,
    echo,
    load,
    plain_console,
    print_document,
    print_json,
    quiet_libraries,
)
from cqwen_dist.tools.plan.question import Question


def plan(config: ConfigFile, overrides: Overrides = None, *, question: Question, as_json: AsJson = False) -> None:
    """Predict whether a run fits, how long it takes, and which layout is best. Needs no torch and no weights."""
    from cqwen_dist.tools.plan.command import run

    document, shown = run(load(config, overrides), question)
    print_document(document, as_json, lambda _: shown)


def doctor(
    folder: Annotated[Path, typer.Option(help="The run folder, tested on all nodes.")] = Path("runs"),
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine, to measure between.")] = 1,
    hostfile: Annotated[Path | None, typer.Option(help="Examine all hosts in this file, over ssh.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only two message sizes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Examine this machine; under srun, --ranks or --hostfile all machines and their network."""
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise UserError("--folder", str(folder), "a folder, or one that can be made")
    if as_json and hostfile is not None:
        raise UserError("--json", True, "without --hostfile: pdsh puts the host's name before each line")
    if hostfile is not None or ranks > 1:
        from cqwen_dist.cluster.launch import run_words

        words = ["doctor", "--folder", str(folder), *["--quick"] * quick, *["--json"] * as_json]
        raise typer.Exit(run_words(words, ranks, hostfile, folder))
    quiet_libraries()
    from cqwen_dist.tools.site.doctor import examine, page

    document = examine(folder, quick)
    if document is None:
        return
    if as_json:
        print_json(document)
    else:
        plain_console(width=None if sys.stdout.isatty() else 160).print(page(document))
    raise typer.Exit(1 if document["red"] else 0)


def accept(
    ranks: Annotated[int, typer.Option(min=2, help="Processes on this machine.")] = 2,
    hostfile: Annotated[
        Path | None, typer.Option(help="Lines `host slots=N`: use these hosts, over ssh, instead of --ranks.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="A new folder that all hosts share.")] = Path("accept"),
    as_json: AsJson = False,
) -> None:
    """Check this site: do N ranks match one rank, does a killed run resume?"""
    if hostfile is not None:
        from cqwen_dist.cluster.launch import read_hostfile

        ranks = sum(read_hostfile(hostfile).values())
    quiet_libraries()
    from cqwen_dist.parallel.collectives import Stopped
    from cqwen_dist.tools.site.accept import Site, table

    try:
        found = Site(ranks, hostfile, folder.absolute(), lambda line: echo(line, err=True)).accept()
    except Stopped:
        raise typer.Exit(75) from None
    print_document(found, as_json, table)
    raise typer.Exit(0 if found["passed"] else 1)
