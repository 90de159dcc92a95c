"""Runs beyond SLURM: a Kubernetes Job, or a task of SkyPilot, rendered to one file that a single command starts."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from cqwen_dist import __version__
from cqwen_dist.config import Config, UserError, load_config
from cqwen_dist.config.templates import template
from cqwen_dist.sizes.architecture import read_architecture
from cqwen_dist.tools.plan.make import plan
from cqwen_dist.tools.plan.memory import GIB
from cqwen_dist.tools.slurm.resources import JobOptions, Resources
from cqwen_dist.tools.slurm.submission import refuse_unresumable, seconds_of

STARTED_BY = {"kubernetes": "kubectl apply -f", "skypilot": "sky jobs launch"}
# Options that each file follows; the others are SLURM's
_FOLLOWED = "nodes gpus_per_node ranks_per_node constraint time cpus_per_task mem container name max_restarts to"
FOLLOWED = {"kubernetes": _FOLLOWED.split(), "skypilot": [*_FOLLOWED.split(), "setup"]}
PROCESS_GIB = 4  # of a rank on a GPU, on the host: Python, CUDA's and NCCL's libraries, a batch on its way


def render_cloud(
    path: Path, overrides: Sequence[str], resources: Resources, options: JobOptions
) -> tuple[str, Path, str]:
    """(text with the resolved config, file name, command that starts it). Data may be elsewhere. Raises `UserError`."""
    to = options.to
    usual = vars(Resources()) | vars(JobOptions())
    for key, value in (vars(resources) | vars(options)).items():
        if key not in FOLLOWED[to] and value != usual[key]:
            raise UserError(f"--{key.replace('_', '-')}", value, f"no value with --to {to}")
    config = load_config(path, list(overrides))
    refuse_unresumable(config, resources)
    name = options.name or re.sub("[^a-z0-9]+", "-", f"cqwen-{Path(config.run.dir).name}".lower())[:50].strip("-")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?", name):
        raise UserError("--name", name, "at most 50 small letters, digits and hyphens, the first a letter")
    if to == "skypilot":
        _refuse_lost(config, resources)
    file = Path(f"{name}.{to}.yaml")
    text = template("cqwen_dist.tools.slurm", f"{to}.yaml.j2").render(
        name=name,
        file=file,
        config=config.to_yaml(),
        r=resources,
        gib=_host_gib(config, resources),
        seconds=round(seconds_of(resources.time or "0")),
        image=options.container or (f"cqwen:{__version__}" if to == "kubernetes" else None),
        setup=options.setup,
        restarts=options.max_restarts * (resources.nodes if to == "kubernetes" else 1),
    )
    return text, file, f"{STARTED_BY[to]} {file}"


def _refuse_lost(config: Config, resources: Resources) -> None:
    """Raises `UserError` if a rented machine would take its checkpoints away."""
    own = not Path(config.run.dir).is_absolute()  # on the machine's own disk
    if own and config.run.mirror is None:
        raise UserError("run.mirror", None, "a store such as s3://BUCKET/RUN, or run.dir on a disk that is mounted")
    if own and resources.nodes > 1:
        raise UserError("run.dir", config.run.dir, "an absolute path, on a disk that all machines share, or --nodes 1")
    if resources.gpus_per_node and resources.constraint is None:
        raise UserError("--constraint", None, "the kind of GPU, such as H100")


def _host_gib(config: Config, resources: Resources) -> int:
    """Memory of a machine in GiB: --mem, else what the planner counts for its ranks."""
    if resources.mem is not None:
        if not re.fullmatch(r"\d+G", resources.mem):
            raise UserError("--mem", resources.mem, "a number with G, such as 200G")
        return int(resources.mem[:-1])
    planned = plan(
        config, nodes=resources.nodes, gpus_per_node=resources.gpus_per_node, architecture=read_architecture(config)
    )
    if not resources.gpus_per_node:
        return math.ceil(resources.ranks * planned.device_gib)
    loading = planned.base_parameters * (2 if config.train.precision == "bf16" else 4) / GIB
    return math.ceil(resources.ranks * (PROCESS_GIB + planned.host_gib + loading))
