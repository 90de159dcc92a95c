"""The command `cqwen`: one verb a function, heavy imports inside the verb so that --help is instant.

Exit codes: 0 done (also when the run was done before), 2 the user's input is wrong (one line says what was found and
what is allowed), 1 a failure, 75 stopped in order and can be resumed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from cqwen_dist.config import UserError
from cqwen_dist.config.errors import Said
from cqwen_dist.report import judge, prepared, use
from cqwen_dist.report.console import print_json as _print_json
from cqwen_dist.report.console import quiet_libraries as _quiet_libraries

OTHER_RANKS_WAIT_S = 5.0

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Distributed LoRA fine-tuning of CausalQwen: language models that read and write numbers as numbers.",
)
config_app = typer.Typer(no_args_is_help=True, help="Check a config, or print its JSON Schema.")
checkpoint_app = typer.Typer(no_args_is_help=True, help="List or verify checkpoints.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure on this machine.")
app.add_typer(config_app, name="config")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(bench_app, name="bench")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Dotted overrides.")]
Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A run, checkpoint or exported folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]


@app.command()
def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train: one rank, as a launcher starts it; bare, a single process. Goes on where the run was."""
    from cqwen_dist.config import load_config

    checked = load_config(config, overrides or [])
    _quiet_libraries()
    from cqwen_dist.parallel.collectives import Stopped
    from cqwen_dist.parallel.runtime import launched
    from cqwen_dist.train.trainer import train as run

    folder = Path(checked.run.dir)
    try:
        run(checked)
    except UserError:  # nothing was trained
        raise
    except Stopped:  # a launcher would take any other code for a failure; the run's status.json says what it was
        judge.leave_report(folder)
        raise typer.Exit(0 if launched(os.environ) else 75) from None
    except Exception:
        judge.leave_report(folder)
        raise
    judge.leave_report(folder)


@app.command()
def launch(
    config: ConfigFile,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    hostfile: Annotated[Path | None, typer.Option(help="Lines `host slots=N`: these hosts instead, over ssh.")] = None,
    env_file: Annotated[Path | None, typer.Option(help="NAME=VALUE lines for the hosts' ranks.")] = None,
    preflight: Annotated[bool, typer.Option(help="Look at the hosts together before training.")] = True,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print command and configurations, start nothing.")] = False,
) -> None:
    """Train on several ranks of this machine, or of the hosts of a hostfile, under the `deepspeed` launcher."""
    from cqwen_dist.cluster.launch import dry_run
    from cqwen_dist.cluster.launch import launch as run

    if dry:
        _print_json(dry_run(config, overrides or [], ranks, hostfile))
        return

    raise typer.Exit(run(config, overrides or [], ranks, hostfile=hostfile, env_file=env_file, look_first=preflight))


@app.command()
def quickstart(
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 2,
    config: Annotated[Path, typer.Option(help="The quickstart's config.")] = Path("configs/quickstart.yaml"),
    as_json: AsJson = False,
) -> None:
    """Everything once on real data, offline: train both stages, export, generate, compare with ridge regression.

    On the CPU, which is fast enough for so small a model; DS_ACCELERATOR=cuda takes GPUs, one a rank.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from cqwen_dist.cluster.launch import launch as run
    from cqwen_dist.config import load_config

    data = load_config(config, overrides or []).data
    if data.eval is None and not data.eval_fraction:
        raise UserError("data.eval", data.eval, "held-out texts, on which the quickstart shows what was learned")
    code = run(config, overrides or [], ranks, quiet=as_json)
    if code:
        raise typer.Exit(code)
    _quiet_libraries()
    from rich.console import Console

    from cqwen_dist.report.quickstart import show

    figures = show(config, overrides or [], Console(highlight=False, stderr=as_json))
    if as_json:
        _print_json(figures)


for verb in (prepared.prepare, judge.report, use.generate, use.predict, use.export):
    app.command()(verb)
app.command("eval")(judge.evaluate)


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="Ranks on each; 0: one CPU rank a machine.")] = 1,
    gpu_memory_gib: Annotated[float, typer.Option(help="Memory of one GPU.")] = 80.0,
    gpu: Annotated[str, typer.Option(help="Whose rates: h200, h100 (default), a100, l40s, cpu.")] = "",
    interconnect: Annotated[str, typer.Option(help="Between machines, a rank: ib400, ib200, eth100, ...")] = "ib400",
    calibrate: Annotated[Path | None, typer.Option(help="Measured rates: `bench step --json`'s document.")] = None,
    sequences: Annotated[int | None, typer.Option(help="Texts in an epoch; default: counted where cheap.")] = None,
    search: Annotated[bool, typer.Option("--search", help="Try every layout; print the best and why.")] = False,
    scale: Annotated[bool, typer.Option("--scale", help="Efficiency from 1 to 1,024 GPUs by layout.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write the config (with --search: of the best layout).")] = None,
    as_json: AsJson = False,
) -> None:
    """Before anything is started: does it fit, what does it cost, which layout is best. No torch, no weights."""
    from cqwen_dist.config import load_config
    from cqwen_dist.plan.command import run

    planned = run(
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
    _print_document(planned.to_dict() if as_json else planned, as_json, lambda found: found.show())


@app.command()
def submit(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs, and so ranks, on each; 0: CPU ranks.")] = 0,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks on each; default: one a GPU, or one.")] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:key=value,...", help="What a stage asks for instead (nodes=1,...): a job of its own."
        ),
    ] = None,
    partition: Annotated[str | None, typer.Option(help="As sbatch takes it; so the next ones.")] = None,
    account: Annotated[str | None, typer.Option()] = None,
    qos: Annotated[str | None, typer.Option()] = None,
    constraint: Annotated[str | None, typer.Option()] = None,
    exclude: Annotated[str | None, typer.Option()] = None,
    limit: Annotated[str | None, typer.Option("--time", help="Time limit; default: none is asked for.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="A further option of sbatch, such as --mem=0.")] = None,
    setup: Annotated[
        list[str] | None, typer.Option(help="A line of bash before anything, such as module load.")
    ] = None,
    venv: Annotated[str | None, typer.Option(help="Virtual environment to activate; default: this Python.")] = None,
    container: Annotated[str | None, typer.Option(help="Image in which Python runs.")] = None,
    container_command: Annotated[str, typer.Option(help="What runs a command in it.")] = "apptainer exec --nv",
    name: Annotated[str | None, typer.Option(help="Of the job; default: cqwen- and the run's folder.")] = None,
    warn_s: Annotated[int, typer.Option(help="Stop in order so many seconds before the time limit.")] = 180,
    max_restarts: Annotated[int, typer.Option(help="Requeues in a row without a new checkpoint.")] = 5,
    preflight: Annotated[bool, typer.Option(help="Look at the nodes together before training.")] = True,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print the script; submit and write nothing.")] = False,
) -> None:
    """Queue the run on SLURM: render a script, let SLURM check it, submit, say how to follow, stop and resume."""
    from cqwen_dist.cluster.slurm import Place, Resources, render
    from cqwen_dist.cluster.submit import advice, check_jobs, plan_jobs
    from cqwen_dist.cluster.submit import submit as send

    asked = Resources(
        nodes, gpus_per_node, ranks_per_node, partition, account, qos, constraint, exclude, limit, tuple(sbatch or [])
    )
    where = Place(venv=venv, container=container, container_command=container_command, setup=tuple(setup or []))
    jobs = plan_jobs(
        config,
        overrides or [],
        asked,
        stage or [],
        where,
        name=name,
        warn_s=warn_s,
        max_restarts=max_restarts,
        preflight=preflight,
    )
    if not dry:
        for line in advice(jobs, send(jobs)):
            typer.echo(line)
        return
    for words in check_jobs(jobs) or ["not checked by SLURM: there is no sbatch here"]:
        typer.echo(words, err=True)
    for job, script, command in zip(jobs.jobs, jobs.scripts, jobs.commands(), strict=True):
        typer.echo(render(job), nl=False)
        typer.echo(f"{script}\n{command}", err=True)


@app.command()
def doctor(
    folder: Annotated[Path, typer.Option(help="Where runs live: measured, and the same on all nodes.")] = Path("runs"),
    ranks: Annotated[int, typer.Option(help="Processes on this machine, to measure between them.")] = 1,
    hostfile: Annotated[Path | None, typer.Option(help="Every host of this file, over ssh.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="What a preflight needs: no operators, two sizes.")] = False,
    as_json: AsJson = False,
) -> None:
    """What this machine has and lacks; under srun, --ranks or --hostfile all of them, and the network between them."""
    folder = folder.absolute()
    if hostfile is not None or ranks > 1:
        from cqwen_dist.cluster.launch import run_words

        words = ["doctor", "--folder", str(folder), *["--quick"] * quick, *["--json"] * as_json]
        raise typer.Exit(run_words(words, ranks, hostfile, folder))
    _quiet_libraries()
    from cqwen_dist.cluster.doctor import examine

    document = examine(folder, quick)
    if document is None:
        return
    if as_json:
        _print_json(document)
    else:
        from rich.console import Console

        from cqwen_dist.cluster.doctor_page import page

        Console(width=None if sys.stdout.isatty() else 160).print(page(document))
    raise typer.Exit(1 if document["red"] else 0)


@app.command()
def status(
    run: Annotated[str, typer.Argument(metavar="RUN|JOB", help="A run's folder, or the id of a SLURM job.")],
    as_json: AsJson = False,
) -> None:
    """What a run is doing: step, time to go, last checkpoint, restarts and why."""
    from cqwen_dist.cluster.watch import lines, look

    document = look(run)
    if as_json:
        _print_json(document)
    else:
        for line in lines(document):
            typer.echo(line)


@config_app.command("validate")
def config_validate(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check a config and print it as resolved."""
    from cqwen_dist.config import load_config

    typer.echo(load_config(config, overrides or []).to_yaml(), nl=False)


@config_app.command("schema")
def config_schema() -> None:
    """JSON Schema of a config file, so that editors complete keys."""
    from cqwen_dist.config import json_schema

    typer.echo(json_schema())


@checkpoint_app.command("list")
def checkpoint_list(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]) -> None:
    """Checkpoints of a run, oldest first."""
    from cqwen_dist.checkpoint.manifest import describe, list_checkpoints

    if not run.is_dir():
        raise UserError("RUN", str(run), "a run's folder")
    for folder in list_checkpoints(run):
        typer.echo(describe(folder))


@checkpoint_app.command("verify")
def checkpoint_verify(path: Annotated[Path, typer.Argument(metavar="PATH", help="Checkpoint or run.")]) -> None:
    """Compare every file with the manifest's size and checksum; of a run, of every checkpoint."""
    from cqwen_dist.checkpoint.manifest import damaged, list_checkpoints, resolve_checkpoint, verify

    found = {folder: verify(folder) for folder in list_checkpoints(path) or [resolve_checkpoint(path)[1]]}
    for folder, problems in found.items():
        typer.echo(f"{folder}: {'; '.join(problems) or 'good'}")
    for folder, problems in found.items():
        if problems:
            raise damaged(folder, problems)


@bench_app.command("data")
def bench_data(
    config: ConfigFile,
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds of each.")] = 3,
    repeat: Annotated[int, typer.Option(min=1, help="The text so many times over.")] = 1,
    workers: Annotated[list[int] | None, typer.Option(help="Processes; several times for several.")] = None,
    as_json: AsJson = False,
) -> None:
    """`cqwen prepare` beside the plain tokenizer: time on the same text, and memory when it is ten times as long."""
    from cqwen_dist.config import load_config

    checked = load_config(config, overrides or [])
    _quiet_libraries()
    from cqwen_dist.bench.data import run, table

    result = run(checked.data, prepared.tokenizer_of(checked), rounds, repeat, workers or [1])
    _print_document(result, as_json, table)


@bench_app.command("loss")
def bench_loss(
    tokens: Annotated[int, typer.Option(help="N, tokens.")] = 512,
    hidden: Annotated[int, typer.Option(help="H, the width of U.")] = 896,
    vocab: Annotated[int, typer.Option(help="V, words.")] = 151_936,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    impl: Annotated[str, typer.Option(help="auto, chunked, triton or reference.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Counted rounds of each contender.")] = 5,
    only: Annotated[list[str] | None, typer.Option(help="Only this contender; may be given several times.")] = None,
    as_json: AsJson = False,
) -> None:
    """The OvR loss, forward and backward, beside its six matrix products alone, plain formulas, peers' kernels."""
    _quiet_libraries()
    from cqwen_dist.bench.loss import run, table

    try:
        result = run(tokens, hidden, vocab, dtype, device, impl, rounds, only or None)
    except ValueError as error:
        raise UserError("bench loss", Said(str(error)), "see cqwen bench loss --help") from None
    _print_document(result, as_json, table)


@bench_app.command("step")
def bench_step(
    config: ConfigFile,
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(help="Counted steps of each contender.", min=1)] = 10,
    peers: Annotated[bool, typer.Option(help="Also HF + PEFT with a trained softmax head, and with Liger.")] = True,
    profile: Annotated[Path | None, typer.Option(help="Folder for a profiler trace and a table.")] = None,
    gpu: Annotated[str, typer.Option(help="Whose peak MFU is of: h200, h100, ...; default: this one's.")] = "",
    as_json: AsJson = False,
) -> None:
    """The whole training step by part at a config's shapes, beside HF + PEFT; `plan --calibrate` reads its --json."""
    from cqwen_dist.config import load_config

    checked = load_config(config, overrides or [])
    _quiet_libraries()
    from cqwen_dist.bench.step import measure, table

    result = measure(checked, rounds=rounds, peers=peers, profile=profile, gpu=gpu)
    if result is not None:
        _print_document(result, as_json, table)


@bench_app.command("memory")
def bench_memory(
    only: Annotated[list[str] | None, typer.Option(help="Only configurations whose name holds this.")] = None,
    as_json: AsJson = False,
) -> None:
    """Peak memory of real training steps over many configurations, beside what `cqwen plan` says."""
    _quiet_libraries()
    from cqwen_dist.bench.memory_check import measure_all, table

    rows, device = measure_all(only or [])
    _print_document({"device": device, "rows": rows}, as_json, lambda found: table(found["rows"], found["device"]))


@bench_app.command("learn")
def bench_learn(
    experiment: Annotated[
        list[str] | None, typer.Argument(metavar="[preserve|starts|numbers]...", help="Default: all three.")
    ] = None,
    data: Annotated[str, typer.Option(help="JSONL: GSM8K's fields, or text; default: Python's docstrings.")] = "",
    tokenizer: Annotated[str, typer.Option(help="A Qwen2.5 tokenizer: preserve at V = 151,936.")] = "",
    out: Annotated[Path, typer.Option(help="Where results lie; the same command goes on there.")] = Path("runs/learn"),
    scale: Annotated[str, typer.Option(help="small (minutes on 2 cores) or full (a GPU).")] = "small",
    seeds: Annotated[int | None, typer.Option(help="Seeds of starts and numbers; default: the scale's.")] = None,
    lanes: Annotated[int | None, typer.Option(help="Trainings side by side; default: by the cores.")] = None,
    minutes: Annotated[float, typer.Option(help="Stop after so long; what is done stays.")] = 60.0,
    only: Annotated[list[str] | None, typer.Option(help="Only arms whose names match; several times for more.")] = None,
    as_json: AsJson = False,
) -> None:
    """Does it learn: knowledge kept and forgotten, the starts compared, numbers against digits. Trains many models."""
    _quiet_libraries()
    from rich.console import Console

    from cqwen_dist.bench.learn import EXPERIMENTS, render, run

    console = Console(stderr=as_json, highlight=False)
    summary = run(
        experiment or list(EXPERIMENTS),
        out=out,
        data=data or None,
        tokenizer=tokenizer or None,
        scale=scale,
        seeds=seeds,
        lanes=lanes,
        minutes=minutes,
        only=only,
        say=console.print,
    )
    if as_json:
        _print_json(summary)
    else:
        for table in render(summary):
            console.print(table)


@bench_app.command("generate")
def bench_generate(
    hidden: Annotated[int, typer.Option(help="H; the default shape is Qwen2.5-0.5B's.")] = 896,
    layers: Annotated[int, typer.Option(help="Layers of the backbone.")] = 24,
    vocab: Annotated[int, typer.Option(help="V, words.")] = 151_936,
    batch: Annotated[list[int] | None, typer.Option(help="Prompts at once; several times for several.")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 8,
    rounds: Annotated[int, typer.Option(help="Counted rounds of each contender.")] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Tokens a second of the modes beside Hugging Face's generate on the same base, random weights."""
    _quiet_libraries()
    from cqwen_dist.bench.generate import run, table

    result = run(hidden, layers, vocab, tuple(batch or (1, 4)), new_tokens=new_tokens, rounds=rounds, device=device)
    if as_json:
        _print_json(result)
    else:
        from rich.console import Console

        Console().print(table(result))


def _print_document(document: Any, as_json: bool, table: Callable[[Any], Any]) -> None:
    """As JSON, or as its table on the console."""
    if as_json:
        _print_json(document)
        return
    from rich.console import Console

    Console().print(table(document))


def main() -> None:
    """Run a verb; turn the user's mistakes into one line and exit code 2."""
    try:
        app()
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            # A launcher ends all ranks when one exits, so rank 0 must be the first; and where this rank alone is
            # wrong, it is still here to say so.
            time.sleep(OTHER_RANKS_WAIT_S)
        typer.echo(f"error: {error}" if rank == "0" else f"error: rank {rank}: {error}", err=True)
        sys.exit(2)
