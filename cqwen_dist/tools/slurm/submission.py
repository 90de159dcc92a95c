"""Runs as SLURM jobs: rendered to a readable script, checked by SLURM, submitted.

The script (job.sbatch.j2) does the work; `slurm/*.sbatch` contain the same text for users who call sbatch
directly.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from shutil import which
from typing import Any

from cqwen_dist.cluster.launch import preflight
from cqwen_dist.config import Config, Said, UserError, writing
from cqwen_dist.config.templates import template
from cqwen_dist.run.files import CONFIG, SLURM
from cqwen_dist.run.folder import is_done
from cqwen_dist.tools.slurm.resources import CONTAINER_COMMAND, GPUS, JobOptions, Resources


@dataclass(frozen=True, kw_only=True)
class Job(JobOptions):
    """A job of one or more runs: its script, and the Python environment on its nodes."""

    folder: Path  # working directory
    run_dir: Path
    script: Path  # the resolved configs are in the same folder
    resources: Resources
    runs: int = 1
    python: str = sys.executable

    def __post_init__(self) -> None:
        super().__post_init__()
        if "\\" in str(self.run_dir):  # a backslash in --output turns off the pattern %j
            raise UserError("run.dir", str(self.run_dir), "a path without backslashes")
        if self.warn_s < 60:
            raise UserError("--warn-s", self.warn_s, "60 or more: SLURM looks at the clock every 30 s")
        if self.resources.time is not None and 0 < seconds_of(self.resources.time) <= self.warn_s:
            allowed = f"more than the {self.warn_s} s of --warn-s, in which the job saves and queues again"
            raise UserError("--time", self.resources.time, allowed)
        if self.container is None and self.container_command != CONTAINER_COMMAND:
            raise UserError("--container-command", self.container_command, "with --container IMAGE")

    @property
    def configs(self) -> list[Path]:
        """The config files for the job's ranks."""
        return [self.script.with_name(f"{i}-{CONFIG}" if i else CONFIG) for i in range(self.runs)]

    def directives(self) -> list[str]:
        """#SBATCH lines; each option is quoted for sbatch."""
        r = self.resources
        options = {
            "job-name": self.name,
            "chdir": str(self.folder),
            "output": str(self.run_dir / SLURM).replace("%", "%%") + "/%j.out",
            "nodes": r.nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": None if any(map(GPUS.match, r.sbatch)) else r.gpus_per_node or None,
            **{name: getattr(r, name) for name in ("partition", "constraint", "time")},
            **({"exclusive": True, "mem": r.mem or "0"} if r.exclusive else {"cpus-per-task": r.cpus, "mem": r.mem}),
            "signal": f"B:USR1@{self.warn_s}",
            "open-mode": "append",
        }
        named = {key: value for key, value in options.items() if value is not None}
        lines = [f"--{key}" if value is True else f"--{key}={_quoted(str(value))}" for key, value in named.items()]
        return [*lines, "--requeue", *(_option(text) for text in r.sbatch)]


def seconds_of(limit: str) -> float:
    """A time limit as sbatch reads it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; 0 stands for none."""
    if limit.isalpha():
        return 0
    days, dash, clock = limit.rpartition("-")
    parts = clock.split(":")
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(int(part) * unit for part, unit in zip(parts, units, strict=False))


def render(job: Job) -> str:
    """A job's complete script."""
    text = template("cqwen_dist.tools.slurm", "job.sbatch.j2")
    return text.render(job=job, shipped=None, directives=job.directives())


def plan_job(
    path: Path, overrides: Sequence[str], resources: Resources, options: JobOptions | None = None
) -> tuple[list[Config], Job]:
    """A job, and the configs of its runs. Writes nothing. Raises `UserError`, also if the ranks do not fit."""
    configs = preflight(path, overrides)
    config = configs[0]
    if all(map(is_done, configs)):
        raise UserError("run.dir", config.run.dir, "a run that is not done yet, or a new folder")
    for each in configs:
        refuse_unresumable(each, resources)
    run_dir = Path(config.run.dir).absolute()
    folder = next(new for n in count(1) if not (new := run_dir / SLURM / f"submit-{n}").exists())
    options = options or JobOptions()
    named = vars(options) | {"name": options.name or f"cqwen-{run_dir.name}"}
    script = folder / "job.sbatch"
    of_runs: dict[str, Any] = {"folder": Path.cwd(), "run_dir": run_dir, "script": script, "runs": len(configs)}
    return configs, Job(**named, **of_runs, resources=resources)


def refuse_unresumable(config: Config, resources: Resources) -> None:
    """Raises `UserError` for a run that could not resume in a requeued job, or whose ranks do not fit."""
    if config.run.resume in ("never", "restart"):
        raise UserError("run.resume", config.run.resume, "auto or last-good: a requeued job resumes")
    config.parallel.refuse_ranks(resources.nodes * resources.ranks)  # now: an error should not wait for the queue


_OF_THE_SITE = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
# sbatch messages if there is no controller or configuration.
_UNREACHABLE = ("unable to contact slurm controller", "could not establish a configuration source", "unable to resolve")


def check_job(job: Job) -> str:
    """Output of `sbatch --test-only`: when and where the job would start. "" if no cluster answers.

    Raises `UserError` with SLURM's message if it would reject the job.
    """
    if which("sbatch") is None:
        return ""
    done = _sbatch("--test-only", script=render(job))
    if done.returncode == 0:
        return _words(done.stderr)
    if any(words in done.stderr.lower() for words in _UNREACHABLE):
        return ""
    raise UserError("sbatch --test-only", Said(_words(done.stderr)), "a job that this cluster can run")


def submit_job(configs: Sequence[Config], job: Job) -> str:
    """Write configs and script into the run folder and submit them; returns the job's id. Raises `UserError`."""
    if not check_job(job):
        said = "no such command here, or nothing that answers it; submit on a machine of the cluster, or use --dry-run"
        raise UserError("sbatch", Said(said), "")
    folder = job.script.parent
    with writing("run.dir", folder, "a folder that can be written"):
        folder.mkdir(parents=True)
        for path, config in zip(job.configs, configs, strict=True):
            path.write_text(config.to_yaml(), encoding="utf-8")
        job.script.write_text(render(job), encoding="utf-8")
    done = _sbatch("--parsable", str(job.script))
    if done.returncode:
        raise UserError("sbatch", Said(_words(done.stderr)), "a job that this cluster takes")
    return done.stdout.strip().split(";")[0]


def advice(job: Job, number: str) -> list[str]:
    """Lines for the user after submitting: the job's id, and how to follow, stop and resume."""
    log = shlex.quote(str(job.run_dir / SLURM / "latest" / "rank-0.log"))
    return [
        f"job {number}: {job.name}, {job.resources.nodes} nodes x {job.resources.ranks} ranks",
        f"follow: cqwen status {shlex.quote(str(job.run_dir))}    tail -F {log}",
        f"stop:   scancel {number}    (in order, to resume later: scancel --batch --signal=TERM {number})",
        f"resume: sbatch {shlex.quote(str(job.script))}    (it resumes from the last checkpoint)",
    ]


def _sbatch(*options: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run sbatch without a surrounding job's SLURM variables (CPU binding, ...): the new job would inherit them."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in _OF_THE_SITE}
    return subprocess.run(["sbatch", *options], input=script, capture_output=True, text=True, env=own)


def _words(text: str) -> str:
    return " ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in text.splitlines())


def _quoted(text: str) -> str:
    if re.fullmatch(r"[\w@%+=:,./\[\]-]+", text, re.ASCII):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _option(text: str) -> str:
    """An option with its value, as `--name=value` or in two words."""
    name, between, value = re.fullmatch(r"(\S+?)(?:(=|\s+)(.*))?", text, re.DOTALL).groups()  # type: ignore[union-attr]
    return name if between is None else f"{name}{between[0]}{_quoted(value)}"
