"""The verbs before a run: config, prepare, plan, doctor. Heavy imports inside, so that --help is instant."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from cqwen_dist.cli.arguments import AsJson, ConfigFile, Overrides, print_document
from cqwen_dist.config import UserError
from cqwen_dist.report.console import plain_console, print_json, quiet_libraries


def config_validate(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check a config and print it as resolved."""
    from cqwen_dist.config import load_config

    typer.echo(load_config(config, overrides or []).to_yaml(), nl=False)
    typer.echo(f"{config}: valid", err=True)


def config_schema(
    basic: Annotated[bool, typer.Option("--basic", help="Only the keys that most runs set.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables in Markdown instead.")] = False,
) -> None:
    """JSON Schema of a config file, so that editors complete keys."""
    from cqwen_dist.config import json_schema

    schema = json_schema(basic)
    if markdown:
        from cqwen_dist.config.keys import schema_markdown

        schema = schema_markdown(json.loads(schema))
    typer.echo(schema, nl=not markdown)


def prepare(
    config: ConfigFile,
    overrides: Overrides = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: data.workers, or all cores.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise the data once, in parallel, for all runs on it, and print what it contains.

    The folder (under data.cache_dir) is named by what is in the sources, the
    tokenizer and the config, so nothing is done twice. A run finds it by itself
    where data.cache_dir is given or the files are large.
    """
    from cqwen_dist.config import load_config

    checked = load_config(config, overrides or [])
    quiet_libraries()
    from cqwen_dist.report.prepared import prepare_and_show

    prepare_and_show(checked, workers, as_json)


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="Ranks on each machine; 0: one CPU rank each.")] = 1,
    gpu_memory_gib: Annotated[float, typer.Option(help="Memory of one GPU.")] = 80.0,
    gpu: Annotated[str, typer.Option(help="Rates of this GPU: h200, h100 (default), a100, l40s, cpu.")] = "",
    interconnect: Annotated[str, typer.Option(help="Between machines, a rank: ib400, ib200, eth100, ...")] = "ib400",
    calibrate: Annotated[Path | None, typer.Option(help="Measured rates: `bench step --json`'s document.")] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Texts in an epoch; default: counted if cheap.")] = None,
    search: Annotated[bool, typer.Option("--search", help="Try every layout; print the best and why.")] = False,
    scale: Annotated[bool, typer.Option("--scale", help="Efficiency from 1 to 1,024 GPUs by layout.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write the config (with --search: of the best layout).")] = None,
    as_json: AsJson = False,
) -> None:
    """Before a run: does it fit, how long does it take, which layout is best. No torch, no weights."""
    from cqwen_dist.config import load_config
    from cqwen_dist.plan.command import run

    document, shown = run(
        load_config(config, overrides or []),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu_memory_gib=gpu_memory_gib,
        gpu=gpu,
        interconnect=interconnect,
        calibration=calibrate,
        sequences=sequences,
        searching=search,
        scale=scale,
        write=write,
    )
    print_document(document, as_json, lambda _: shown)


def doctor(
    folder: Annotated[Path, typer.Option(help="The runs' folder: measured, compared on all nodes.")] = Path("runs"),
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine; measure between them.")] = 1,
    hostfile: Annotated[Path | None, typer.Option(help="Examine all hosts of this file, over ssh.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="As a preflight does: no operators, two sizes.")] = False,
    as_json: AsJson = False,
) -> None:
    """What this machine has and lacks; under srun, --ranks or --hostfile all machines and their network."""
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise UserError("--folder", str(folder), "a folder, or one that can be made")
    if hostfile is not None or ranks > 1:
        from cqwen_dist.cluster.launch import run_words

        words = ["doctor", "--folder", str(folder), *["--quick"] * quick, *["--json"] * as_json]
        raise typer.Exit(run_words(words, ranks, hostfile, folder))
    quiet_libraries()
    from cqwen_dist.cluster.doctor import examine, page

    document = examine(folder, quick)
    if document is None:
        return
    if as_json:
        print_json(document)
    else:
        plain_console(width=None if sys.stdout.isatty() else 160).print(page(document))
    raise typer.Exit(1 if document["red"] else 0)
