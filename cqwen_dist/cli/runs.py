"""Verbs that train: here, on multiple ranks, on a cluster. Heavy imports are inside, so that --help is instant."""

from __future__ import annotations

import os
import resource
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from cqwen_dist.cli.streams import outlive
from cqwen_dist.config.errors import UserError
from cqwen_dist.console import ConfigFile, Overrides, load, print_json

LEAST_FILES = 256


def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train in this process, or as one of a launcher's ranks. Resumes a stopped run."""
    from cqwen_dist.parallel.launcher import end_with_launcher, holding_signals

    outlive()
    end_with_launcher()
    _open_enough_files()
    checked = load(config, overrides)
    with holding_signals():
        from cqwen_dist.api import train as run
        from cqwen_dist.parallel.collectives import Stopped
        from cqwen_dist.parallel.runtime import launched

        try:
            run(checked)
        except Stopped:  # a launcher treats any code except 0 as a failure; status.json has `preempted`
            if launched(os.environ):
                raise typer.Exit from None
            typer.echo(f"to go on: {resuming(Path(checked.run.dir))}", err=True)
            raise typer.Exit(75) from None


def launch(
    config: ConfigFile,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    hostfile: Annotated[Path | None, typer.Option(help="Lines `host slots=N`: train on these hosts over ssh.")] = None,
    env_file: Annotated[Path | None, typer.Option(help="File with NAME=VALUE lines for the hosts' ranks.")] = None,
    blind: Annotated[bool, typer.Option("--no-preflight", help="Skip the check of the hosts.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print command and configs; start nothing.")] = False,
) -> None:
    """Train on multiple ranks on this machine, or on a hostfile's hosts, with the `deepspeed` launcher."""
    if dry:
        from cqwen_dist.cluster.launch import dry_run

        print_json(dry_run(config, overrides or [], ranks, hostfile))
        return
    code = start_ranks(config, overrides or [], ranks, hostfile=hostfile, env_file=env_file, look_first=not blind)
    if code == 75:
        options = {"--ranks": ranks, "--hostfile": hostfile, "--env-file": env_file}
        given = [f"{name} {shlex.quote(str(value))}" for name, value in options.items() if value not in (None, 1)]
        folder = Path(load(config, overrides).run.dir)
        typer.echo(f"to go on: {' '.join([resuming(folder, 'launch'), *given])}", err=True)
    raise typer.Exit(code)


def resuming(folder: Path, verb: str = "train") -> str:
    """The command that resumes a run, overrides included."""
    return f"cqwen {verb} {shlex.quote(str(folder))}"


def start_ranks(config: Path, overrides: list[str], ranks: int, **options: Any) -> int:
    """Train on multiple ranks; returns the exit code. options: see `cluster.launch.launch`."""
    from cqwen_dist.cluster.launch import launch as run

    outlive()
    _open_enough_files()
    return run(config, overrides, ranks, **options)


def submit(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Number of machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs (and ranks) per machine; 0: CPU ranks.")] = 0,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks per machine; default: one per GPU, or 1.")] = None,
    stage: Annotated[list[str] | None, typer.Option(help="Separate job for a stage: heads:nodes=1,time=60.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition; default: the cluster's default.")] = None,
    account: Annotated[str | None, typer.Option(help="Account to charge.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Required node features.")] = None,
    exclude: Annotated[str | None, typer.Option(help="Nodes to exclude.")] = None,
    limit: Annotated[str | None, typer.Option("--time", help="Time limit: 90 (minutes) or 1-12:00:00.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="Another sbatch option, such as --mem=0.")] = None,
    setup: Annotated[list[str] | None, typer.Option(help="Bash line to run first, such as module load.")] = None,
    venv: Annotated[str | None, typer.Option(help="Virtual environment to activate; default: this Python.")] = None,
    container: Annotated[str | None, typer.Option(help="Container image for Python.")] = None,
    container_command: Annotated[str, typer.Option(help="Command that runs Python in it.")] = "apptainer exec --nv",
    name: Annotated[str | None, typer.Option(help="Job name; default: cqwen- and the run folder's name.")] = None,
    warn_s: Annotated[int, typer.Option(help="Seconds before the time limit to save and stop.")] = 180,
    max_restarts: Annotated[int, typer.Option(help="Consecutive requeues without a new checkpoint.")] = 5,
    blind: Annotated[bool, typer.Option("--no-preflight", help="Skip the check of the nodes.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print the script; submit and write nothing.")] = False,
) -> None:
    """Queue the run on SLURM: render a script, let SLURM check it, submit; print how to follow, stop and resume."""
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
    """Raise the open-file limit as far as allowed. Raises `UserError` if it stays too low for ranks to connect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    soft = max(soft, 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < LEAST_FILES:
        raise UserError("ulimit -n", soft, f"{LEAST_FILES} or more open files")
