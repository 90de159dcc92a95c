"""The verbs that train: here, on ranks, on a cluster, on a table. Heavy imports inside, so that --help is instant."""

from __future__ import annotations

import os
import resource
import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cqwen_dist.cli.arguments import AsJson, ConfigFile, Overrides, load
from cqwen_dist.cli.streams import outlive
from cqwen_dist.config import UserError
from cqwen_dist.console import plain_console, print_json, quiet_libraries

LEAST_FILES = 256
SHIPPED = Path(__file__).parents[1] / "configs"  # also in a wheel


def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train: as one of a launcher's ranks, or without a launcher in a single process. A stopped run goes on."""
    from cqwen_dist.parallel.launcher import end_with_launcher

    outlive()
    end_with_launcher()
    _open_enough_files()
    checked = load(config, overrides)
    from cqwen_dist.api import train as run
    from cqwen_dist.parallel.collectives import Stopped
    from cqwen_dist.parallel.runtime import launched

    try:
        run(checked)
    except Stopped:  # a launcher takes any code but 0 for a failure; status.json has `preempted`
        raise typer.Exit(0 if launched(os.environ) else 75) from None


def launch(
    config: ConfigFile,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    hostfile: Annotated[Path | None, typer.Option(help="Lines `host slots=N`: use these hosts, over ssh.")] = None,
    env_file: Annotated[Path | None, typer.Option(help="NAME=VALUE lines for the hosts' ranks.")] = None,
    blind: Annotated[bool, typer.Option("--no-preflight", help="Do not examine the hosts first.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print command and configurations, start nothing.")] = False,
) -> None:
    """Train on several ranks of this machine, or of the hosts of a hostfile, under the `deepspeed` launcher."""
    if dry:
        from cqwen_dist.cluster.launch import dry_run

        print_json(dry_run(config, overrides or [], ranks, hostfile))
        return
    raise typer.Exit(
        _launch(config, overrides or [], ranks, hostfile=hostfile, env_file=env_file, look_first=not blind)
    )


def _launch(config: Path, overrides: list[str], ranks: int, **options: Any) -> int:
    from cqwen_dist.cluster.launch import launch as run

    outlive()
    _open_enough_files()
    return run(config, overrides, ranks, **options)


def quickstart(
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 2,
    config: Annotated[Path, typer.Option(help="The quickstart's config.")] = SHIPPED / "quickstart.yaml",
    as_json: AsJson = False,
) -> None:
    """Everything once on real data, offline: train both stages, export, generate, compare with ridge regression.

    It runs on the CPU, which is fast enough for this small model; with DS_ACCELERATOR=cuda on one GPU for each rank.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from cqwen_dist.cluster.launch import launch as run

    data = load(config, overrides).data
    if data.eval is None and not data.eval_fraction:
        raise UserError("data.eval", data.eval, "held-out texts, on which the quickstart shows what was learned")
    code = run(config, overrides or [], ranks, quiet=as_json)
    if code:
        raise typer.Exit(code)
    quiet_libraries()
    from cqwen_dist.tools.report.quickstart import show

    metrics = show(config, overrides or [], plain_console(stderr=as_json))
    if as_json:
        print_json(metrics)


def fit(
    table: Annotated[str, typer.Argument(metavar="FILE", help="A table: .csv, .tsv, .parquet or .jsonl.")],
    target: Annotated[str, typer.Option(help="The column of numbers to predict.")],
    base: Annotated[str, typer.Option(help="A model's folder or hub name.")] = "HuggingFaceTB/SmolLM2-135M",
    text_columns: Annotated[list[str] | None, typer.Option(help="Read these columns alone; repeat it.")] = None,
    template: Annotated[str | None, typer.Option(help="The prompt of a row, columns in braces; default: all.")] = None,
    test_fraction: Annotated[float, typer.Option(help="Share of the rows to judge by.")] = 0.2,
    split: Annotated[str | None, typer.Option(help="FILE.json[#N] with the test rows' numbers from 0 instead.")] = None,
    test_rows: Annotated[int | None, typer.Option(min=2, help="Judge by so many of them at most, drawn.")] = None,
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

    say = partial(typer.echo, err=as_json)
    asked = (table, target, base, text_columns or [], template, test_fraction, split, seed, minutes, test_rows)
    made = prepare(FitRequest(*asked), folder, say)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        _train_fit(folder, as_json)
    found = judge(folder, made, say)
    if as_json:
        print_json(found)
    else:
        _show_fit(folder, found)


def _train_fit(folder: Path, as_json: bool) -> None:
    """As `cqwen train` or, where this machine has several GPUs, `cqwen launch` does. Raises what they raise."""
    import torch

    config, gpus = folder / "fit.yaml", torch.cuda.device_count()
    if gpus < 2:
        train(config)
    elif code := _launch(config, [], gpus, quiet=as_json):
        raise typer.Exit(code)


def _show_fit(folder: Path, found: dict[str, Any]) -> None:
    from rich.table import Table

    columns = ("", "MAE", "RMSE", "median error", "R2", "90 % interval holds", "its median width")
    title = f"{found['target']} of {found['rows']:,} rows that were held out"
    table = Table(*columns, title=title, title_justify="left")
    for name, errors in found["results"].items():
        cells = [f"{errors[key]:.4g}" for key in ("mae", "rmse", "mdae")]
        held = f"{errors['coverage_90']:.1%}" if "coverage_90" in errors else ""
        width = f"{errors['width_90']:.4g}" if "width_90" in errors else ""
        table.add_row(name, *cells, f"{errors['r2']:.3f}", held, width)
    console = plain_console()
    console.print(table)
    for row in found["examples"]:
        console.print(" | ".join(row["prompt"].strip().splitlines()))
        interval = f"90 % between {row['low_90']:g} and {row['high_90']:g}"
        console.print(f"    predicted {row['predicted']}, {interval}; true {row['truth']:g}")
    console.print(f"{folder}: fit.svg (a picture), predicted.csv, fit.yaml (cqwen train), run/report.html")
    console.print(f"more rows: cqwen predict {folder} FILE")


def submit(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs, and so ranks, on each machine; 0: CPU ranks.")] = 0,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks on a machine; default: its GPUs, or one.")] = None,
    stage: Annotated[list[str] | None, typer.Option(help="A stage's own job, such as heads:nodes=1,time=60.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition; default: the cluster's default.")] = None,
    account: Annotated[str | None, typer.Option(help="Account that the job is charged to.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Features that the nodes must have.")] = None,
    exclude: Annotated[str | None, typer.Option(help="Nodes not to use.")] = None,
    limit: Annotated[str | None, typer.Option("--time", help="Time limit: 90 (minutes) or 1-12:00:00.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="A further option of sbatch, such as --mem=0.")] = None,
    setup: Annotated[list[str] | None, typer.Option(help="A line of bash to run first, as module load.")] = None,
    venv: Annotated[str | None, typer.Option(help="Virtual environment to activate; default: this Python.")] = None,
    container: Annotated[str | None, typer.Option(help="Container image for Python.")] = None,
    container_command: Annotated[str, typer.Option(help="Command that runs Python in it.")] = "apptainer exec --nv",
    name: Annotated[str | None, typer.Option(help="Name of the job; default: cqwen- and the run's folder.")] = None,
    warn_s: Annotated[int, typer.Option(help="Stop in order this many seconds before the time limit.")] = 180,
    max_restarts: Annotated[int, typer.Option(help="Requeues in a row without a new checkpoint.")] = 5,
    blind: Annotated[bool, typer.Option("--no-preflight", help="Do not examine the nodes first.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print the script; submit and write nothing.")] = False,
) -> None:
    """Queue the run on SLURM: render a script, let SLURM check it, submit, say how to follow, stop and resume."""
    from cqwen_dist.cluster.slurm import Resources, advice, check_jobs, plan_jobs, render, submit_jobs, waits_for

    asked = Resources(
        nodes, gpus_per_node, ranks_per_node, partition, account, qos, constraint, exclude, limit, tuple(sbatch or [])
    )
    python = {"venv": venv, "container": container, "container_command": container_command, "setup": tuple(setup or [])}
    options = {"name": name, "warn_s": warn_s, "max_restarts": max_restarts, "preflight": not blind}
    checked, jobs = plan_jobs(config, overrides or [], asked, stage or [], **python, **options)
    if not dry:
        for line in advice(jobs, submit_jobs(checked, jobs)):
            typer.echo(line)
        return
    for words in check_jobs(jobs) or ["not checked by SLURM: there is no sbatch here, or nothing that answers it"]:
        typer.echo(words, err=True)
    for index, job in enumerate(jobs):
        typer.echo(render(job), nl=False)
        wait = waits_for(f"<id of job {index}>" if index else None)
        typer.echo(f"{job.script}\n{' '.join(['sbatch', *wait, shlex.quote(str(job.script))])}", err=True)


def _open_enough_files() -> None:
    """Raise the limit of open files as far as allowed. Raises `UserError` if it stays too low for ranks to connect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    soft = max(soft, 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < LEAST_FILES:
        raise UserError("ulimit -n", soft, f"{LEAST_FILES} or more open files")
