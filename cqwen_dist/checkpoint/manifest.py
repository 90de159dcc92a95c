"""A run's checkpoints on disk: which are complete, which to resume, which to keep (no torch).

The manifest makes a folder a checkpoint. It lists every file with size and checksum, and is written last. A folder
without a manifest, or one that contradicts it, is not a checkpoint.
"""

import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.run.files import BEST, CHECKPOINTS, CONFIG, LATEST, MANIFEST, file_record, read_line, read_object, sync

FORMAT = 3  # of a checkpoint and its run folder; increase it when their files change their meaning
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".distcp")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """A checkpoint's manifest; None if it is unreadable or incomplete."""
    manifest = read_object(folder / MANIFEST)
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(manifest.get("step"), int) or not isinstance(files, dict):
        return None
    whole = all(
        isinstance(record, dict) and isinstance(record.get("size"), int) and isinstance(record.get("sha256"), str)
        for record in files.values()
    )
    return manifest if whole else None


def refuse_other_format(folder: Path) -> None:
    """Raises `UserError` for a checkpoint in another format: its content is whole, but this version cannot judge it."""
    written = read_object(folder / MANIFEST).get("format")
    if isinstance(written, int) and written != FORMAT:
        allowed = f"{FORMAT}, which this version reads (the version that wrote it, or another run.dir)"
        raise UserError("format", written, allowed, str(folder / MANIFEST))


def verify(folder: Path) -> list[str]:
    """Problems with a checkpoint, one line per file. Empty if it is good."""
    manifest = read_manifest(folder)
    if manifest is None:
        return [f"{MANIFEST}: missing or not readable"]
    problems = []
    for name, record in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif path.stat().st_size != record["size"]:
            problems.append(f"{name}: {path.stat().st_size} bytes, {record['size']} in the manifest")
        elif file_record(path)["sha256"] != record["sha256"]:
            problems.append(f"{name}: checksum differs from the manifest")
    return problems


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Folder for the checkpoint at `step`."""
    return run_dir / CHECKPOINTS / f"step-{step:08d}"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints with a readable manifest, oldest first. Copies under other names do not count."""
    found = {folder: read_manifest(folder) for folder in sorted((run_dir / CHECKPOINTS).glob("step-*"))}
    return [folder for folder, known in found.items() if known and folder == checkpoint_folder(run_dir, known["step"])]


def evaluated(run_dir: Path) -> dict[int, dict[str, float]]:
    """Metrics by step for every checkpoint with a manifest; empty if it was not evaluated."""
    manifests = filter(None, map(read_manifest, list_checkpoints(run_dir)))
    return {int(manifest["step"]): manifest.get("figures") or {} for manifest in manifests}


def leftovers(folder: Path) -> list[Path]:
    """Unfinished folders in `checkpoints/` from killed runs. Matches only names that this package creates."""
    return [path for path in folder.glob(".step-*") if re.fullmatch(r"\.step-\d{8,}\.(partial|replaced)", path.name)]


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The verified checkpoint named in `latest`; None if there is none. Raises `UserError` if it is damaged.

    Without a readable `latest` it is the newest checkpoint, so a kill before `latest` was written loses nothing.
    """
    return choose_checkpoint(run_dir)[0]


def choose_checkpoint(run_dir: Path, resume: str = "auto") -> tuple[Path | None, str]:
    """Returns (checkpoint to resume or None, note for the user or ""). Writes nothing.

    resume: `auto` rejects a damaged checkpoint, names the file and suggests the previous checkpoint; `last-good` uses
    the previous one; `never` rejects any resumption. Raises `UserError`.
    """
    known = list_checkpoints(run_dir)
    for folder in sorted((run_dir / CHECKPOINTS).glob("step-*")):
        refuse_other_format(folder)  # also with a `latest`: training on would replace it
    named = run_dir / read_line(run_dir / LATEST)
    # A kill before the first `latest` was written leaves a complete checkpoint without it.
    if named.parent != run_dir / CHECKPOINTS:  # no `latest`, or it names no checkpoint
        if not known:
            return None, ""
        named = known[-1]
    if resume == "never":
        raise UserError("run.resume", resume, f"auto or last-good, as {named} is there; or another run.dir")
    problems = verify(named)
    if not problems:
        return named, ""
    if resume == "last-good" and (before := _good_before(named)) is not None:
        return before, f"{named.name} is damaged ({problems[0]}): going on from {before.name}"
    raise damaged(named, problems)


def _good_before(folder: Path) -> Path | None:
    known = reversed(list_checkpoints(folder.parent.parent))
    return next((other for other in known if other.name < folder.name and not verify(other)), None)


def damaged(folder: Path, problems: list[str]) -> UserError:
    """Error for a damaged checkpoint; suggests the newest good one before it."""
    before = _good_before(folder)
    offer = "no other checkpoint is good"
    if before is not None:
        offer = f"run.resume=last-good goes on from {before.relative_to(folder.parent.parent)}"
    return UserError("checkpoint", Said(problems[0]), f"a whole checkpoint ({offer})", str(folder))


def put_aside(folder: Path) -> Path:
    """Rename a checkpoint before deleting it: an interrupted deletion must not leave a folder that looks valid."""
    aside = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)  # left by a killed run
    folder.rename(aside)
    return aside


def finish_renames(run_dir: Path) -> None:
    """Finish renames and deletions that a kill interrupted. A complete checkpoint gets its name back."""
    folder = run_dir / CHECKPOINTS
    for left in sorted(leftovers(folder)):  # sorting puts `.partial`, the new one, before `.replaced`
        final = left.with_name(left.stem[1:])
        # The kill came between the two renames: the folder is whole and only lacks its name
        if not final.exists() and not verify(left):
            left.rename(final)
        elif left.suffix == ".replaced":
            shutil.rmtree(left, ignore_errors=True)
    if folder.is_dir():
        sync(folder)


def refuse_pickles(folder: Path) -> None:
    """Raises `UserError` if a folder contains pickled tensors: reading a pickle runs code from the file."""
    found = sorted(p.relative_to(folder) for level in ("*", "*/*") for p in folder.glob(level) if p.suffix in PICKLES)
    if found:
        allowed = "safetensors: reading a pickle runs code, so it is not read (convert it where you trust it)"
        raise UserError("checkpoint", Said(f"{found[0]}, a pickle"), allowed, str(folder))


def resolve_checkpoint(path: str | Path, key: str = "checkpoint") -> tuple[Path, Path]:
    """(run folder, checkpoint folder) for a run, its `latest`, a checkpoint, or a fit's folder. Raises `UserError`."""
    path = Path(path)
    if path.name == LATEST and path.is_file():
        path = path.parent
    if (best := path / BEST).is_file():
        named = path / read_line(best)
        if not named.resolve().is_relative_to(path.resolve()):
            raise UserError("checkpoint", Said(f"{named} is a path outside of the folder"), "", str(best))
        path = named
    refuse_other_format(path)
    if read_manifest(path) is not None:
        if problems := verify(path):
            raise UserError("checkpoint", Said(problems[0]), "a whole checkpoint", str(path))
        run = Path(os.path.abspath(path)).parents[1]  # abspath keeps links: use the run that contains the link
        return run if (run / CONFIG).is_file() else path.resolve().parents[1], path
    folder = latest_checkpoint(path)
    if folder is None:
        refuse_pickles(path)
        allowed = "a run folder with `latest`, or a checkpoint folder with manifest.json"
        raise UserError(key, str(path), allowed if key == "checkpoint" else f"{allowed}, or a PEFT adapter")
    return path, folder


@dataclass(frozen=True)
class Retention:
    """Keep the newest, and the best by an evaluation metric.

    metric: measured at the checkpoint's step. The newest is always kept, because it was just written and verified.
    """

    newest: int = 3
    best: int = 0
    metric: str = "eval/cls_loss_mean"
    higher: bool = False  # whether a higher metric is better

    def outdated(self, metrics: Mapping[int, Mapping[str, float]], newest_step: int) -> list[int]:
        """Steps to delete. metrics: by step, empty for checkpoints without an evaluation.

        Ignores steps after `newest_step`: they were written before the run was set back.
        """
        steps = sorted(step for step in metrics if step <= newest_step)
        kept = {*steps[-max(self.newest, 1) :], newest_step}
        kept |= set(self.best_of({step: metrics[step] for step in steps}))
        return [step for step in steps if step not in kept]

    def best_of(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Best steps, best first; ties go to the later step."""
        known = {step: found[self.metric] for step, found in metrics.items() if self.metric in found}
        sign = -1 if self.higher else 1
        order = sorted((sign * value, -step) for step, value in known.items() if not math.isnan(value))
        return [-step for _, step in order[: self.best]]
