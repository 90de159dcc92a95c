"""`cqwen submit`: from a config to jobs in the queue, every check that needs no node done first."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from cqwen_dist.cluster import slurm
from cqwen_dist.cluster.launch import preflight
from cqwen_dist.cluster.slurm import Job, PythonSetup, Resources
from cqwen_dist.config import Config, UserError, refuse_ranks
from cqwen_dist.config.errors import Said
from cqwen_dist.plan import read_architecture
from cqwen_dist.run.files import CONFIG, SLURM
from cqwen_dist.run.folder import is_done
from cqwen_dist.training.zero.settings import deepspeed_config, feature_parameters


@dataclass(frozen=True)
class JobPlan:
    """A run ready to be submitted: its jobs in order, each waiting for the one before."""

    config: Config
    folder: Path  # of scripts and config, made when they are written
    jobs: list[Job]

    @property
    def scripts(self) -> list[Path]:
        """Where each job's script goes."""
        return [self.folder / f"job-{index + 1}.sbatch" for index in range(len(self.jobs))]

    def commands(self) -> list[str]:
        """The sbatch lines, with placeholders for the ids of jobs not yet submitted."""
        lines = []
        for index, script in enumerate(self.scripts):
            wait = slurm.waits_for(f"<id of job {index}>" if index else None)
            lines.append(" ".join(["sbatch", *wait, shlex.quote(str(script))]))
        return lines


def plan_jobs(
    path: Path,
    overrides: Sequence[str],
    resources: Resources,
    stages: Sequence[str] = (),
    place: PythonSetup | None = None,
    **options: Any,
) -> JobPlan:
    """What would be submitted; writes nothing. options: further fields of `Job`, by name.

    Raises `UserError` for what `cqwen launch` would refuse, and for ranks that the config does not fit.
    """
    config = preflight(path, overrides)
    if is_done(config):
        raise UserError("run.dir", config.run.dir, "a run that is not done yet, or a new folder")
    if config.run.resume in ("never", "restart"):
        raise UserError("run.resume", config.run.resume, "auto or last-good: a job that is queued again goes on")
    by_stage = dict(slurm.read_stage_option(text, resources) for text in stages)
    run_dir = Path(config.run.dir).absolute()
    folder = _free_folder(run_dir / SLURM)
    jobs = []
    split = slurm.split_stages(config, resources, by_stage)
    trained = feature_parameters(config, read_architecture(config))
    name = options.pop("name", None) or f"cqwen-{run_dir.name}"
    for index, (last, needs) in enumerate(split):
        refuse_ranks(config.parallel.vocab_group_size, needs.nodes * needs.ranks)
        deepspeed_config(config, needs.nodes * needs.ranks, trained)  # so is what contradicts it under `deepspeed:`
        chained = [f"run.stop_after={last}"] if index + 1 < len(split) else []
        jobs.append(
            Job(
                name=name if len(split) == 1 else f"{name}-{last}",
                folder=Path.cwd(),
                run_dir=run_dir,
                config=str(folder / CONFIG),
                overrides=tuple(chained),
                resources=needs,
                place=place or PythonSetup(),
                **options,
            )
        )
    return JobPlan(config, folder, jobs)


def check_jobs(plan: JobPlan) -> list[str]:
    """SLURM's answer for each job; empty without sbatch. Raises `UserError` where it would refuse one."""
    answers = (slurm.check(slurm.render(job)) for job in plan.jobs)
    return [answer for answer in answers if answer is not None]


def submit(plan: JobPlan) -> list[str]:
    """Write config and scripts into the run's folder, submit; returns the jobs' ids. Raises `UserError`."""
    if not check_jobs(plan):
        found = Said("no such command here, or nothing that answers it")
        raise UserError("sbatch", found, "a machine of the cluster (--dry-run needs none)")
    try:
        plan.folder.mkdir(parents=True)
        (plan.folder / CONFIG).write_text(plan.config.to_yaml(), encoding="utf-8")
        for script, job in zip(plan.scripts, plan.jobs, strict=True):
            script.write_text(slurm.render(job), encoding="utf-8")
    except OSError as error:
        raise UserError("run.dir", str(plan.folder), f"a folder that can be written ({error.strerror})") from None
    ids: list[str] = []
    for script in plan.scripts:
        ids.append(slurm.send(script, after=ids[-1] if ids else None))
    return ids


def advice(plan: JobPlan, ids: Sequence[str]) -> list[str]:
    """Lines for the user after submitting: the ids, and how to follow, stop and resume."""
    run_dir = plan.jobs[0].run_dir
    quoted = shlex.quote(str(run_dir))
    lines = []
    for index, (number, job) in enumerate(zip(ids, plan.jobs, strict=True)):
        after = f", after {ids[index - 1]}" if index else ""
        lines.append(f"job {number}{after}: {job.name}, {job.resources.nodes} nodes x {job.resources.ranks} ranks")
    scripts = " ".join(shlex.quote(str(script)) for script in plan.scripts[-1:])
    return [
        *lines,
        f"follow: cqwen status {quoted}    tail -F {shlex.quote(str(run_dir / SLURM / 'latest' / 'rank-0.log'))}",
        f"stop:   scancel {' '.join(ids)}    (in order, to go on later: scancel --batch --signal=TERM {ids[0]})",
        f"resume: sbatch {scripts}    (it goes on from the last checkpoint)",
    ]


def _free_folder(parent: Path) -> Path:
    return next(folder for n in count(1) if not (folder := parent / f"submit-{n}").exists())
