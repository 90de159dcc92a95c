"""Verbs of the tools: planner, site checks, SLURM, report, exports. Imports are local, so that --help stays fast."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cqwen_dist.config import UserError
from cqwen_dist.config.errors import writing
from cqwen_dist.console import (
    AsJson,
    Checkpoint,
    ConfigFile,
    Overrides,
    echo,
    load,
    plain_console,
    print_document,
    print_json,
    quiet_libraries,
)
from cqwen_dist.run.files import write_atomically

SHIPPED = Path(__file__).parents[1] / "configs"  # also in a wheel


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="Ranks per machine; 0: one CPU rank per machine.")] = 1,
    gpu_memory_gib: Annotated[float | None, typer.Option(help="Memory per GPU; default: as in --gpu.")] = None,
    gpu: Annotated[str, typer.Option(help="Rates of this GPU: h200, h100 (default), a100, l40s, cpu.")] = "",
    interconnect: Annotated[
        str, typer.Option(help="Network between machines, per rank: ib400, ib200, eth100, ...")
    ] = "ib400",
    calibrate: Annotated[
        Path | None, typer.Option(help="Measured rates: output of `python -m benchmarks step --json`.")
    ] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Texts per epoch; default: counted if cheap.")] = None,
    text_tokens: Annotated[
        float | None, typer.Option(min=1, help="Tokens per packed text (data.pack); default: one text per row.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Try every layout; print the best and why.")] = False,
    scale: Annotated[bool, typer.Option("--scale", help="Efficiency from 1 to 1,024 GPUs by layout.")] = False,
    limit: Annotated[bool, typer.Option("--limits", help="Largest base and longest text on 1, 8, 64 GPUs.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write the config (with --search: the best layout).")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict whether a run fits, how long it takes, and which layout is best. Needs no torch and no weights."""
    from cqwen_dist.tools.plan.command import run

    document, shown = run(
        load(config, overrides),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu_memory_gib=gpu_memory_gib,
        gpu=gpu,
        interconnect=interconnect,
        calibration=calibrate,
        sequences=sequences,
        text_tokens=text_tokens,
        searching=search,
        scale=scale,
        limit=limit,
        write=write,
    )
    print_document(document, as_json, lambda _: shown)


def doctor(
    folder: Annotated[Path, typer.Option(help="The run folder, tested on all nodes.")] = Path("runs"),
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine, to measure between.")] = 1,
    hostfile: Annotated[Path | None, typer.Option(help="Examine all hosts in this file, over ssh.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only preflight checks: no operators, two sizes.")] = False,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Examine this machine; under srun, --ranks or --hostfile all machines and their network."""
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise UserError("--folder", str(folder), "a folder, or one that can be made")
    if hostfile is not None or ranks > 1:
        from cqwen_dist.cluster.launch import run_words

        words = ["doctor", "--folder", str(folder), *["--quick"] * quick]
        if not as_json or hostfile is None:
            raise typer.Exit(run_words([*words, *["--json"] * as_json], ranks, hostfile, folder))
        written = folder / f".doctor-{os.getpid()}.json"  # pdsh puts the host's name before each line of a rank
        code = run_words([*words, "--out", str(written)], ranks, hostfile, folder, quiet=True)
        if written.is_file():
            echo(written.read_text(encoding="utf-8"))
            written.unlink()
        raise typer.Exit(code)
    quiet_libraries()
    from cqwen_dist.tools.site.doctor import examine, page

    document = examine(folder, quick)
    if document is None:
        return
    if out is not None:
        with writing("--folder", folder, "a folder that every node may write"):
            write_atomically(out, json.dumps(document, indent=2))
    elif as_json:
        print_json(document)
    else:
        plain_console(width=None if sys.stdout.isatty() else 160).print(page(document))
    raise typer.Exit(1 if document["red"] else 0)


def accept(
    ranks: Annotated[int, typer.Option(min=2, help="Processes on this machine.")] = 2,
    gpus: Annotated[int | None, typer.Option(min=2, help="Like --ranks, with one local GPU per rank.")] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="Lines `host slots=N`: use these hosts, over ssh, instead of --ranks.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="A new folder that all hosts share.")] = Path("accept"),
    as_json: AsJson = False,
    steps: Annotated[Path | None, typer.Option(hidden=True, help="A file: on ranks that this command starts.")] = None,
) -> None:
    """Check this site: do N ranks match one rank, do traffic and memory match the plan, does a killed run resume?"""
    if steps is not None:
        quiet_libraries()
        from cqwen_dist.tools.site.ranks import measure_ranks

        if (measured := measure_ranks()) is not None:
            write_atomically(steps, json.dumps(measured, indent=1))
        return
    if gpus is not None:
        import torch

        if gpus > (here := torch.cuda.device_count()):
            raise UserError("--gpus", gpus, f"at most {here}, the GPUs here; --ranks needs none")
        ranks = gpus
    if hostfile is not None:
        from cqwen_dist.cluster.hostfile import read_hostfile

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

    metrics = show(config, overrides or [], plain_console(stderr=as_json))
    if as_json:
        print_json(metrics)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs, or of `cqwen fit`, to compare.")],
    out: Annotated[Path | None, typer.Option(help="Output file; default: RUN/report.html, or ./report.html.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Held-out texts that the checkpoints continue.")] = 0,
) -> None:
    """Curves, calibration, predictions and a diagnosis of runs in one self-contained HTML page."""
    if samples:
        quiet_libraries()
    from cqwen_dist.run.files import REPORT
    from cqwen_dist.tools.report.diagnosis import diagnose
    from cqwen_dist.tools.report.html import write_report
    from cqwen_dist.tools.report.run_data import read_run

    page = out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    with writing("--out", page):
        echo(f"report: {write_report(runs, page, samples)}")
    for run in runs:
        found, where = read_run(run), f"{run}: " if len(runs) > 1 else ""
        if found.fit:
            echo(f"  {where}{found.fit['verdict']}")
        for finding in diagnose(found):
            echo(f"  {finding.level:4}  {where}{finding.title}. {finding.text}")


def explain(
    checkpoint: Checkpoint,
    prompt: Annotated[list[str], typer.Option(help="Text whose next word is explained; repeatable.")],
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat template: prompts are user messages.")] = False,
    dims: Annotated[int, typer.Option(min=1, help="How many of U's dimensions to name.")] = 8,
    individuals: Annotated[int, typer.Option(min=0, help="Also draw this many individuals.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="SVG file: the prompt's individuals, projected.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda:N, or auto.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Show which dimensions of U decide the word after a prompt, and what other individuals choose."""
    if plot is not None and len(prompt) > 1:
        raise UserError("--plot", str(plot), "with one prompt")
    quiet_libraries()
    from cqwen_dist.checkpoint.trained import load_trained
    from cqwen_dist.data.chat import Chat
    from cqwen_dist.tools.report.why import picture, tables, why

    model, tokenizer = load_trained(checkpoint, device)
    texts = [Chat(tokenizer.tokenizer).question(message) for message in prompt] if chat else prompt
    found = [why(model, tokenizer, text, None, dims, individuals, seed, not chat) for text in texts]
    if plot is not None:
        with writing("--plot", plot):
            plot.write_text(picture(found[0]), encoding="utf-8")
    print_document({"outputs": [asdict(each) for each in found]}, as_json, lambda _: tables(found))


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
    exclusive: Annotated[bool, typer.Option(help="Whole machines, with all cores and memory.")] = False,
    cpus_per_task: Annotated[int | None, typer.Option(help="Cores per machine; default: 4 per GPU.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory per machine, such as 200G.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="Another sbatch option, such as --gres=gpu:a100:8.")] = None,
    setup: Annotated[list[str] | None, typer.Option(help="Bash line to run first, such as module load.")] = None,
    venv: Annotated[str | None, typer.Option(help="Virtual environment to activate; default: this Python.")] = None,
    container: Annotated[str | None, typer.Option(help="Container image for Python.")] = None,
    container_command: Annotated[str, typer.Option(help="Command that runs Python in it.")] = "apptainer exec --nv",
    name: Annotated[str | None, typer.Option(help="Job name; default: cqwen- and the run folder's name.")] = None,
    warn_s: Annotated[int, typer.Option(help="Seconds before the time limit to save and stop.")] = 180,
    max_restarts: Annotated[int, typer.Option(help="Consecutive requeues without a new checkpoint.")] = 5,
    blind: Annotated[bool, typer.Option("--no-preflight", help="Skip the check of the nodes.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Only print the script.")] = False,
) -> None:
    """Queue the run on SLURM: render a script, let SLURM check it, submit; print how to follow, stop and resume."""
    from cqwen_dist.tools.slurm.submission import (
        Resources,
        advice,
        check_jobs,
        plan_jobs,
        render,
        submit_jobs,
        waits_for,
    )

    asked = Resources(
        *(nodes, gpus_per_node, ranks_per_node, partition, account, qos, constraint, exclude, limit),
        *(exclusive, cpus_per_task, mem, tuple(sbatch or [])),
    )
    python = {"venv": venv, "container": container, "container_command": container_command, "setup": tuple(setup or [])}
    options = {"name": name, "warn_s": warn_s, "max_restarts": max_restarts, "preflight": not blind}
    checked, jobs = plan_jobs(config, overrides or [], asked, stage or [], **python, **options)
    if not dry:
        for line in advice(jobs, submit_jobs(checked, jobs)):
            echo(line)
        return
    for words in check_jobs(jobs) or ["not checked by SLURM: there is no sbatch here, or nothing that answers it"]:
        echo(words, err=True)
    for index, job in enumerate(jobs):
        echo(render(job), nl=False)
        wait = waits_for(f"<id of job {index}>" if index else None)
        echo(f"{job.script}\n{' '.join(['sbatch', *wait, shlex.quote(str(job.script))])}", err=True)


def status(
    run: Annotated[str, typer.Argument(metavar="RUN|JOB", help="A run's folder, or the id of a SLURM job.")],
    as_json: AsJson = False,
) -> None:
    """Show a run's step, time left, last checkpoint, restarts and their reasons."""
    from cqwen_dist.tools.slurm.run_status import lines, look

    print_document(look(run), as_json, lambda document: "\n".join(lines(document)))


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New or empty folder.")],
    merge: Annotated[bool, typer.Option("--merge", help="Fold the adapters into the backbone.")] = False,
    dtype: Annotated[str, typer.Option(help="Backbone dtype, fp32 or bf16; default: as trained. Heads: fp32.")] = "",
    as_base: Annotated[
        bool, typer.Option("--as-base", "--as-qwen2", help="Write a plain model of the base's class: logits are loc_S.")
    ] = False,
    drop_bias: Annotated[bool, typer.Option("--drop-bias", help="With --as-base: omit the bias.")] = False,
    shard_size: Annotated[str, typer.Option(help="Maximum file size, such as 5GB.")] = "5GB",
) -> None:
    """Write a folder for from_pretrained, with a model card. The folder is verified before it appears."""
    if drop_bias and not as_base:
        raise UserError("--drop-bias", True, "with --as-base")
    quiet_libraries()
    from cqwen_dist.tools.export.export import export as write

    folder = write(
        checkpoint, out, merge, dtype=dtype or None, as_base=as_base, drop_bias=drop_bias, shard_size=shard_size
    )
    echo(f"exported to {folder}")
    if as_base:
        echo("It is a plain language model and writes no numbers: it writes <NUM> in their place.", err=True)
