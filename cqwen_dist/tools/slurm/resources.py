"""The options of `cqwen submit`, each once: the resources of a job, and its script."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from cqwen_dist.config.errors import UserError

GPUS = re.compile(r"--gres[= ].*gpu|--gpus|-G")  # sbatch options that request GPUs
_ARRAY = re.compile(r"--array\b|-a\b|-a\d")
_LIMIT = re.compile(r"--time[= ]|-t")
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
CONTAINER_COMMAND = "apptainer exec --nv"


@dataclass(frozen=True)
class Resources:
    """Resources of a job. None: the cluster's default."""

    nodes: Annotated[int, typer.Option(help="Number of machines.")] = 1
    gpus_per_node: Annotated[int, typer.Option(help="GPUs (and ranks) per machine; 0: CPU ranks.")] = 0
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks per machine; default: one per GPU, or 1.")] = None
    partition: Annotated[str | None, typer.Option(help="Partition; default: the cluster's default.")] = None
    constraint: Annotated[str | None, typer.Option(help="Required node features; beyond SLURM the kind of GPU.")] = None
    time: Annotated[str | None, typer.Option(help="Time limit: 90 (minutes) or 1-12:00:00.")] = None
    exclusive: Annotated[bool, typer.Option(help="Whole machines, with all cores and memory.")] = False
    cpus_per_task: Annotated[int | None, typer.Option(help="Cores per machine; default: 4 per GPU.")] = None
    mem: Annotated[str | None, typer.Option(help="Memory per machine, such as 200G.")] = None
    sbatch: Annotated[list[str], typer.Option(help="Another sbatch option, such as --account=lab.")] = field(
        default_factory=list
    )

    def __post_init__(self) -> None:
        _refuse_lines(self)
        for name, least in (("nodes", 1), ("gpus_per_node", 0), ("ranks_per_node", 1), ("cpus_per_task", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"--{name.replace('_', '-')}", value, f"{least} or more")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise UserError("--time", self.time, "minutes, H:M:S, D-H:M:S or UNLIMITED")
        if self.exclusive and self.cpus_per_task is not None:
            raise UserError("--cpus-per-task", self.cpus_per_task, "no value with --exclusive, which takes all cores")
        for option in self.sbatch:
            if not option.startswith("-"):
                raise UserError("--sbatch", option, "an option of sbatch, such as --mem=0")
            if _LIMIT.match(option):
                raise UserError("--sbatch", option, "--time of cqwen submit, which knows --warn-s")
            if _ARRAY.match(option):
                raise UserError("--sbatch", option, "several configs, which train in one job")
            if GPUS.match(option) and not self.gpus_per_node:
                raise UserError("--sbatch", option, "with --gpus-per-node too: how many that is on a node")

    @property
    def ranks(self) -> int:
        """Ranks per node."""
        return self.ranks_per_node or self.gpus_per_node or 1

    @property
    def cpus(self) -> int:
        """Cores per node, if it is shared with other jobs."""
        return self.cpus_per_task or max(self.ranks, 4 * self.gpus_per_node)


def _refuse_lines(options: object) -> None:
    """Raises `UserError` for text that is more than a line: it would be more than a word of a script."""
    for value in vars(options).values():
        for text in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(text, (str, Path)) and not str(text).isprintable():
                raise UserError("a value of the job", str(text), "printable text on one line")


@dataclass(frozen=True)
class JobOptions:
    """Where a job runs, how it names itself, finds Python, and ends."""

    to: Annotated[str, typer.Option(help="slurm, or a file for kubernetes or skypilot.")] = "slurm"
    setup: Annotated[list[str], typer.Option(help="Bash line to run first, such as module load.")] = field(
        default_factory=list
    )
    venv: Annotated[str | None, typer.Option(help="Virtual environment to activate; default: this Python.")] = None
    container: Annotated[str | None, typer.Option(help="Container image for Python.")] = None
    container_command: Annotated[str, typer.Option(help="Command that runs Python in it.")] = CONTAINER_COMMAND
    name: Annotated[str | None, typer.Option(help="Job name; default: cqwen- and the run folder's name.")] = None
    warn_s: Annotated[int, typer.Option(help="Seconds before the time limit to save and stop.")] = 180
    max_restarts: Annotated[int, typer.Option(help="Consecutive requeues without a new checkpoint.")] = 5
    no_preflight: Annotated[bool, typer.Option("--no-preflight", help="Skip the check of the nodes.")] = False

    def __post_init__(self) -> None:
        if self.to not in ("slurm", "kubernetes", "skypilot"):
            raise UserError("--to", self.to, "slurm, kubernetes or skypilot")
        _refuse_lines(self)
        if self.max_restarts < 0:
            raise UserError("--max-restarts", self.max_restarts, "0 or more")
