"""`cqwen submit`: from a config to jobs in the queue, every check that needs no node done first."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from cqwen_dist.cluster import slurm
from cqwen_dist.cluster.launch import preflight
from cqwen_dist.cluster.slurm import Job, Resources
from cqwen_dist.config import Config, UserError, refuse_ranks
from cqwen_dist.config.errors import Said
from cqwen_dist.plan import read_architecture
from cqwen_dist.run.files import SLURM
from cqwen_dist.run.folder import is_done
from cqwen_dist.training.zero.settings import deepspeed_config, feature_parameters


def plan_jobs(
    path: Path, overrides: Sequence[str], resources: Resources, stages: Sequence[str] = (), **options: Any
) -> tuple[Config, list[Job]]:
    """The config and the jobs of a run, each waiting for the one before; writes nothing.

    options: further fields of `Job`, by name. Raises `UserError` for what `cqwen launch` would refuse, and for ranks
    that the config does not fit.
    """
    config = preflight(path, overrides)
    if is_done(config):
        raise UserError("run.dir", config.run.dir, "a run that is not done yet, or a new folder")
    if config.run.resume in ("never", "restart"):
        raise UserError("run.resume", config.run.resume, "auto or last-good: a job that is queued again goes on")
    by_stage = dict(slurm.read_stage_option(text, resources) for text in stages)
    split = slurm.split_stages(config, resources, by_stage)
    run_dir = Path(config.run.dir).absolute()
    folder = next(new for n in count(1) if not (new := run_dir / SLURM / f"submit-{n}").exists())
    trained = feature_parameters(config, read_architecture(config))
    name = options.pop("name", None) or f"cqwen-{run_dir.name}"
    jobs = []
    for number, (last, needs) in enumerate(split, 1):
        refuse_ranks(config.parallel.vocab_group_size, needs.nodes * needs.ranks)
        deepspeed_config(config, needs.nodes * needs.ranks, trained)  # refuses what contradicts it under `deepspeed:`
        jobs.append(
            Job(
                name=name if len(split) == 1 else f"{name}-{last}",
                folder=Path.cwd(),
                run_dir=run_dir,
                script=folder / f"job-{number}.sbatch",
                resources=needs,
                overrides=(f"run.stop_after={last}",) if number < len(split) else (),
                **options,
            )
        )
    return config, jobs


def check_jobs(jobs: Sequence[Job]) -> list[str]:
    """SLURM's answer for each job; empty without sbatch. Raises `UserError` where it would refuse one."""
    answers = (slurm.check(slurm.render(job)) for job in jobs)
    return [answer for answer in answers if answer is not None]


def submit(config: Config, jobs: Sequence[Job]) -> list[str]:
    """Write config and scripts into the run's folder, submit; returns the jobs' ids. Raises `UserError`."""
    if not check_jobs(jobs):
        found = Said("no such command here, or nothing that answers it")
        raise UserError("sbatch", found, "a machine of the cluster (--dry-run needs none)")
    folder = jobs[0].script.parent
    try:
        folder.mkdir(parents=True)
        jobs[0].config.write_text(config.to_yaml(), encoding="utf-8")
        for job in jobs:
            job.script.write_text(slurm.render(job), encoding="utf-8")
    except OSError as error:
        raise UserError("run.dir", str(folder), f"a folder that can be written ({error.strerror})") from None
    ids: list[str] = []
    for job in jobs:
        ids.append(slurm.send(job.script, after=ids[-1] if ids else None))
    return ids


def advice(jobs: Sequence[Job], ids: Sequence[str]) -> list[str]:
    """Lines for the user after submitting: the ids, and how to follow, stop and resume."""
    run_dir = jobs[0].run_dir
    lines = []
    for index, (number, job) in enumerate(zip(ids, jobs, strict=True)):
        after = f", after {ids[index - 1]}" if index else ""
        lines.append(f"job {number}{after}: {job.name}, {job.resources.nodes} nodes x {job.resources.ranks} ranks")
    log = shlex.quote(str(run_dir / SLURM / "latest" / "rank-0.log"))
    return [
        *lines,
        f"follow: cqwen status {shlex.quote(str(run_dir))}    tail -F {log}",
        f"stop:   scancel {' '.join(ids)}    (in order, to go on later: scancel --batch --signal=TERM {ids[0]})",
        f"resume: sbatch {shlex.quote(str(jobs[-1].script))}    (it goes on from the last checkpoint)",
    ]
