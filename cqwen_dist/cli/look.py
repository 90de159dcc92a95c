"""The verbs that look at a run: status, eval, checkpoint. Heavy imports inside, so that --help is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cqwen_dist.config import UserError
from cqwen_dist.console import AsJson, Checkpoint, Run, print_document, quiet_libraries


def evaluate(
    checkpoint: Checkpoint,
    data: Annotated[str, typer.Option(help="JSONL file or bundled:NAME; default: the run's own held-out data.")] = "",
    base: Annotated[str, typer.Option(help="Base model to compare with; default: the run's own.")] = "",
    label_set: Annotated[float | None, typer.Option(help="Also sets of words: all whose P is above this.")] = None,
    reject_below: Annotated[float | None, typer.Option(help="Also 'I don't know' where no P reaches this.")] = None,
    micro_batch_size: Annotated[int, typer.Option(help="Texts in a batch.", min=1)] = 8,
    as_json: AsJson = False,
) -> None:
    """Held-out metrics of a trained model and of its base model, by deterministic inference."""
    quiet_libraries()
    from cqwen_dist.api import evaluate as run

    metrics = run(
        checkpoint,
        data or None,
        base=base or None,
        label_set=label_set,
        reject_below=reject_below,
        micro_batch_size=micro_batch_size,
    )
    print_document(metrics, as_json, lambda _: "\n".join(f"{name:40} {value:.6g}" for name, value in metrics.items()))


def status(
    run: Annotated[str, typer.Argument(metavar="RUN|JOB", help="A run's folder, or the id of a SLURM job.")],
    as_json: AsJson = False,
) -> None:
    """What a run is doing: step, time to go, last checkpoint, restarts and why."""
    from cqwen_dist.cluster.run_status import lines, look

    print_document(look(run), as_json, lambda document: "\n".join(lines(document)))


def checkpoint_list(run: Run) -> None:
    """List the checkpoints of a run, oldest first."""
    from cqwen_dist.checkpoint.manifest import describe, list_checkpoints
    from cqwen_dist.run.files import CONFIG

    found = list_checkpoints(run)
    if not found and not (run / CONFIG).is_file():
        raise UserError("RUN", str(run), f"a run's folder (it holds {CONFIG} and checkpoints)")
    for folder in found:
        typer.echo(describe(folder))
    if not found:
        typer.echo("no checkpoint yet", err=True)


def checkpoint_verify(path: Annotated[Path, typer.Argument(metavar="PATH", help="Checkpoint or run.")]) -> None:
    """Compare every file with the manifest's size and checksum; for a run, in every checkpoint."""
    from cqwen_dist.checkpoint.manifest import damaged, list_checkpoints, resolve_checkpoint, verify

    found = {folder: verify(folder) for folder in list_checkpoints(path) or [resolve_checkpoint(path)[1]]}
    for folder, problems in found.items():
        typer.echo(f"{folder}: {'; '.join(problems) or 'good'}")
    for folder, problems in found.items():
        if problems:
            raise damaged(folder, problems)
