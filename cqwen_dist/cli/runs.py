"""Verbs that prepare data and train: here, on multiple ranks, on SLURM. Imports are local: --help is instant."""

import atexit
import gc
import os
import resource
import shlex
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from cqwen_dist.cli.streams import outlive
from cqwen_dist.config.errors import UserError, writing
from cqwen_dist.console import AsJson, ConfigFile, Overrides, Words, echo, load, print_json, quiet_libraries
from cqwen_dist.tools.slurm.resources import JobOptions, Resources

SHIPPED = Path(__file__).parents[1] / "configs"  # also in a wheel
LEAST_FILES = 256


def prepare(
    config: ConfigFile,
    overrides: Overrides = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: one per core.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise the data once, in parallel, for every run that uses it, and print its statistics.

    The folder (under data.cache_dir) is named by a digest of the sources, the tokenizer and the config, so no work is
    repeated. Runs find it automatically if data.cache_dir is set or the files are large.
    """
    checked = load(config, overrides)
    quiet_libraries()
    from cqwen_dist.cli.prepared import prepare_and_show

    prepare_and_show(checked, workers, as_json)


def train(config: ConfigFile, overrides: Words = None) -> None:
    """Train in this process, or as one of a launcher's ranks. Resumes a stopped run. With more configs, runs train in
    turns on one base."""
    train_here(config, overrides)


def train_here(
    config: Path, overrides: list[str] | None = None, callbacks: Sequence[Any] = (), again: str = ""
) -> None:
    """`train`. callbacks: as of `cqwen_dist.train`. again: how to go on after a stop, if not by `cqwen train`."""
    from cqwen_dist.config.one_job import load_configs

    def run(configs: list[Any]) -> Any:
        from cqwen_dist.api import train as run

        return run(configs if configs[1:] else configs[0], callbacks=callbacks)

    _until_stopped(lambda: load_configs(config, overrides or []), run, again)


def _until_stopped(load_all: Callable[[], list[Any]], run: Callable[[list[Any]], Any], again: str = "") -> None:
    """Train runs in this process. Ends with code 75 after a stop, with 1 if one of the runs has failed."""
    from cqwen_dist.parallel.launcher import end_with_launcher, holding_signals

    outlive()
    end_with_launcher()
    _open_enough_files()
    configs = load_all()
    atexit.register(gc.unfreeze)  # Triton reports as leaked what nothing looks for at the end
    gc.disable()  # what is imported stays: to look for garbage in it takes a second now, and half a second at the end
    with holding_signals() as ignore_further_signals:
        import_module("cqwen_dist.training.train")
        from cqwen_dist.parallel.collectives import Stopped
        from cqwen_dist.parallel.runtime import launched

        gc.freeze()
        gc.enable()
        try:
            found = run(configs)
        except Stopped:  # a launcher treats any code except 0 as a failure; status.json has `preempted`
            ignore_further_signals()
            if launched(os.environ):
                raise typer.Exit from None
            echo(f"to go on: {again or resuming(configs)}", err=True)
            raise typer.Exit(75) from None
        if isinstance(found, list) and any(each.status == "fatal" for each in found):
            raise typer.Exit(1)


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP", help="YAML file with a config and keys (docs/running.md).")],
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    hostfile: Annotated[Path | None, typer.Option(help="Lines `host slots=N`: train on these hosts over ssh.")] = None,
) -> None:
    """Train a config with several values of keys, in one job on one base, and name the best. Resumes too."""
    from cqwen_dist.config.one_job import read_sweep
    from cqwen_dist.parallel.runtime import launched

    asked, configs = read_sweep(file, overrides or [])
    within = launched(os.environ)
    if not within and (ranks > 1 or hostfile is not None):
        from cqwen_dist.cluster.launch import run_words

        outlive()
        _open_enough_files()
        folder = Path(configs[0].run.dir).parent
        if code := run_words(["sweep", str(file.absolute()), *(overrides or [])], ranks, hostfile, folder):
            raise typer.Exit(code)
    else:

        def run(configs: list[Any]) -> Any:
            from cqwen_dist.training.together import train_points

            quiet_libraries()
            return train_points(asked, configs)

        _until_stopped(lambda: configs, run, f"cqwen sweep {shlex.quote(str(file))}")
    if not within:
        from cqwen_dist.training.together import verdict

        for line in verdict(asked, configs):
            echo(line)


def launch(
    config: ConfigFile,
    overrides: Words = None,
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    hostfile: Annotated[Path | None, typer.Option(help="Lines `host slots=N`: train on these hosts over ssh.")] = None,
    blind: Annotated[bool, typer.Option("--no-preflight", help="Skip the check of the hosts.")] = False,
) -> None:
    """Train on multiple ranks on this machine, or on a hostfile's hosts, with the `deepspeed` launcher."""
    code = start_ranks(config, overrides or [], ranks, hostfile=hostfile, look_first=not blind)
    if code == 75:
        from cqwen_dist.config.one_job import load_configs

        options = {"--ranks": ranks, "--hostfile": hostfile}
        given = [f"{name} {shlex.quote(str(value))}" for name, value in options.items() if value not in (None, 1)]
        echo(f"to go on: {' '.join([resuming(load_configs(config, overrides or []), 'launch'), *given])}", err=True)
    raise typer.Exit(code)


def quickstart(
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 2,
    config: Annotated[Path, typer.Option(help="The quickstart config.")] = SHIPPED / "quickstart.yaml",
    as_json: AsJson = False,
) -> None:
    """Everything once on real data, offline: train both stages, export, generate, compare with ridge regression.

    It runs on the CPU, which is fast enough for this small model, or with DS_ACCELERATOR=cuda on one GPU per rank.
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

    metrics = show(config, overrides or [], as_json)
    if as_json:
        print_json(metrics)


def submit(
    config: ConfigFile,
    overrides: Words = None,
    *,
    resources: Resources,
    job: JobOptions,
    dry: Annotated[bool, typer.Option("--dry-run", help="Only print the script, or the file.")] = False,
) -> None:
    """Queue the run on SLURM: render a script, let SLURM check it, submit; print how to follow, stop and resume.

    With --to, write the file of a Kubernetes Job or a SkyPilot task, and print the command that starts it.
    """
    if job.to != "slurm":
        from cqwen_dist.tools.slurm.clouds import render_cloud

        text, file, start = render_cloud(config, overrides or [], resources, job)
        if dry:
            echo(text, nl=False)
            return
        with writing("--name", file, "a name whose file can be written here"):
            file.write_text(text, encoding="utf-8")
        echo(f"wrote {file}; to start it: {start}")
        return
    from cqwen_dist.tools.slurm.submission import advice, check_job, plan_job, render, submit_job

    checked, made = plan_job(config, overrides or [], resources, job)
    if not dry:
        for line in advice(made, submit_job(checked, made)):
            echo(line)
        return
    unchecked = "not checked by SLURM: there is no sbatch here, or nothing that answers it"
    echo(check_job(made) or unchecked, err=True)
    echo(render(made), nl=False)


def resuming(configs: Sequence[Any], verb: str = "train") -> str:
    """The command that resumes runs, overrides included."""
    return f"cqwen {verb} {' '.join(shlex.quote(str(Path(config.run.dir))) for config in configs)}"


def start_ranks(config: Path, overrides: list[str], ranks: int, **options: Any) -> int:
    """Train on multiple ranks; returns the exit code. options: see `cluster.launch.launch`."""
    from cqwen_dist.cluster.launch import launch as run

    outlive()
    _open_enough_files()
    return run(config, overrides, ranks, **options)


def _open_enough_files() -> None:
    """Raise the open-file limit as far as allowed. Raises `UserError` if it stays too low for ranks to connect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    soft = max(soft, 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < LEAST_FILES:
        raise UserError("ulimit -n", soft, f"{LEAST_FILES} or more open files")
