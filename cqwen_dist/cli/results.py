"""Verbs that inspect a run: status, report, eval, checkpoint. Imports are local: --help is instant."""

from pathlib import Path
from typing import Annotated

import typer

from cqwen_dist.checkpoint.manifest import damaged, list_checkpoints, read_manifest, resolve_checkpoint, verify
from cqwen_dist.config.errors import UserError, writing
from cqwen_dist.console import AsJson, Checkpoint, Run, echo, print_document, quiet_libraries
from cqwen_dist.run.files import CONFIG, LATEST, read_line
from cqwen_dist.run.status import run_in


def status(
    run: Annotated[str, typer.Argument(metavar="RUN|JOB", help="A run's folder, or the id of a SLURM job.")],
    as_json: AsJson = False,
) -> None:
    """Show a run's step, time left, last checkpoint, restarts and their reasons."""
    from cqwen_dist.tools.slurm.run_status import lines, look

    print_document(look(run), as_json, lambda document: "\n".join(lines(document)))


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs, or of `cqwen fit`, to compare.")],
    out: Annotated[Path | None, typer.Option(help="Output file; default: RUN/report.html, or ./report.html.")] = None,
) -> None:
    """Curves, calibration, predictions and a diagnosis of runs in one self-contained HTML page."""
    from cqwen_dist.run.files import REPORT
    from cqwen_dist.tools.report.diagnosis import diagnose
    from cqwen_dist.tools.report.html import write_report

    page = out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    with writing("--out", page):
        read = write_report(runs, page)
    echo(f"report: {page}")
    for folder, run in zip(runs, read, strict=True):
        where = f"{folder}: " if len(runs) > 1 else ""
        if run.fit:
            echo(f"  {where}{run.fit['verdict']}")
        for finding in diagnose(run):
            echo(f"  {finding.level:4}  {where}{finding.title}. {finding.text}")


def evaluate(
    checkpoint: Checkpoint,
    data: Annotated[str | None, typer.Option(help="JSONL or bundled:NAME; default: the run's held-out data.")] = None,
    base: Annotated[str | None, typer.Option(help="Base model to compare with; default: the run's base.")] = None,
    label_set: Annotated[float | None, typer.Option(help="Also evaluate word sets: words with P above this.")] = None,
    micro_batch_size: Annotated[int, typer.Option(help="Texts per batch.", min=1)] = 8,
    as_json: AsJson = False,
) -> None:
    """Held-out metrics of a trained model and its base model, with deterministic inference."""
    quiet_libraries()
    from cqwen_dist.api import evaluate as run

    metrics = run(checkpoint, data, base=base, micro_batch_size=micro_batch_size, label_set=label_set)
    print_document(metrics, as_json, lambda _: "\n".join(f"{name:40} {value:.6g}" for name, value in metrics.items()))


def checkpoint_list(run: Run) -> None:
    """List a run's checkpoints, oldest first."""
    found = list_checkpoints(run := run_in(run))
    if not found and not (run / CONFIG).is_file():
        raise UserError("RUN", str(run), f"a run's folder (it holds {CONFIG} and checkpoints)")
    for folder in found:
        echo(describe(folder))
    if not found:
        echo("no checkpoint yet", err=True)


def describe(folder: Path) -> str:
    """One line per checkpoint: folder, step, stage, size, evaluation loss, and whether it is the latest."""
    manifest = read_manifest(folder) or {"files": {}}
    size = sum(record["size"] for record in manifest["files"].values())
    parts = [str(folder), f"step {manifest.get('step')}", f"stage {manifest.get('stage')}", f"{size / 2**20:.1f} MiB"]
    figures = found if isinstance(found := manifest.get("figures"), dict) else {}
    for loss in ("eval/cls_loss_mean", "eval/crps_target"):  # the second, if no words were learnt
        if isinstance(figures.get(loss), float):
            parts.append(f"{loss} {figures[loss]:.5g}")
            break
    if read_line(folder.parent.parent / LATEST).endswith(folder.name):
        parts.append("latest")
    return "  ".join(parts)


def checkpoint_verify(path: Annotated[Path, typer.Argument(metavar="PATH", help="Checkpoint or run.")]) -> None:
    """Check every file against the manifest's size and checksum; for a run, in every checkpoint."""
    found = {folder: verify(folder) for folder in list_checkpoints(run_in(path)) or [resolve_checkpoint(path)[1]]}
    for folder, problems in found.items():
        echo(f"{folder}: {'; '.join(problems) or 'good'}")
    for folder, problems in found.items():
        if problems:
            raise damaged(folder, problems)
