"""What makes a folder a checkpoint: a manifest that names every file with its size and checksum (no torch).

The manifest is written last. A folder without one, or that disagrees with it, is not a checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cqwen_dist.config import UserError
from cqwen_dist.config.errors import Said

FORMAT = 2
MANIFEST = "manifest.json"
LATEST = "latest"  # in the run folder: the path of the newest checkpoint, moved after it is whole
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".distcp")
PACKAGES = ("cqwen-dist", "torch", "transformers", "peft", "deepspeed", "safetensors")


def file_record(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else _digest(file)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def _digest(file: Any) -> Any:
    digest = hashlib.sha256()  # Python 3.10
    while block := file.read(1 << 20):
        digest.update(block)
    return digest


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old one or the new one, whole, also after a power loss."""
    # Not by the process's number: containers on several hosts have the same ones, and any rank may write a status.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_small(path: Path) -> str:
    """A file's text. Raises OSError, also for what is no file: reading a pipe would wait for somebody to write."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
    return path.read_text(encoding="utf-8")


def let_read(path: Path) -> None:
    """Let those read a file, or a folder's files, who may read the folder: safetensors writes for its owner alone."""
    files = path.rglob("*") if path.is_dir() else [path]
    for file in files:
        if file.is_file() and not file.is_symlink():
            file.chmod(file.parent.stat().st_mode & 0o666)


def sync_folder(path: Path) -> None:
    """Make renames inside a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def versions() -> dict[str, str]:
    """Versions of what matters for reading a run again, as installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def git_commit() -> str | None:
    """The commit of the working directory's repository, or None."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True, cwd=Path.cwd()
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint, or None where there is none that can be read."""
    try:
        manifest = json.loads(read_small(folder / MANIFEST))
    except (OSError, ValueError):
        return None
    return manifest if _well_formed(manifest) else None


def _well_formed(manifest: Any) -> bool:
    """Whether it has the parts that are read here."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or not isinstance(manifest.get("step"), int):
        return False
    files = manifest.get("files")
    return isinstance(files, dict) and all(
        isinstance(record, dict) and isinstance(record.get("size"), int) and isinstance(record.get("sha256"), str)
        for record in files.values()
    )


def verify(folder: Path, checksums: bool = True) -> list[str]:
    """What is wrong with a checkpoint, one line a file; an empty list if it is good."""
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
        elif checksums and file_record(path)["sha256"] != record["sha256"]:
            problems.append(f"{name}: checksum differs from the manifest")
    return problems


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lives."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints with a readable manifest, oldest first; a copy under another name is none."""
    found = {folder: read_manifest(folder) for folder in sorted((run_dir / "checkpoints").glob("step-*"))}
    return [folder for folder, known in found.items() if known and folder == checkpoint_folder(run_dir, known["step"])]


def leftovers(folder: Path) -> list[Path]:
    """What kills left in `checkpoints/`, by the names that only this package gives."""
    return [path for path in folder.glob(".step-*") if re.fullmatch(r"\.step-\d{8,}\.(partial|replaced)", path.name)]


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint that `latest` names, verified; None where there is none yet. Raises `UserError` if it is damaged.

    Where there is no `latest`, or not a readable one, it is the newest whole checkpoint: a kill between a checkpoint
    and its `latest` loses nothing.
    """
    return choose_checkpoint(run_dir)[0]


def describe(folder: Path) -> str:
    """A checkpoint in one line: where, step, stage, size, the loss of its evaluation, whether `latest` names it."""
    manifest = read_manifest(folder) or {"files": {}}
    size = sum(record["size"] for record in manifest["files"].values())
    said = [str(folder), f"step {manifest.get('step')}", f"stage {manifest.get('stage')}", f"{size / 2**20:.1f} MiB"]
    figures = manifest.get("figures") or {}
    said += [f"{name} {figures[name]:.5g}" for name in ("eval/cls_loss_mean",) if name in figures]
    pointer = folder.parent.parent / LATEST
    if pointer.is_file() and pointer.read_text(encoding="utf-8").strip().endswith(folder.name):
        said.append("latest")
    return "  ".join(said)


def choose_checkpoint(run_dir: Path, resume: str = "auto") -> tuple[Path | None, str]:
    """(the checkpoint that a run goes on from or None, what is to be said about it); reads only.

    resume: what to do where the newest is damaged: `auto` refuses it by the name of the file, and offers the one
    before; `last-good` takes the one before. `never` refuses to go on at all. Raises `UserError`.
    """
    known = list_checkpoints(run_dir)
    try:
        named = run_dir / read_small(run_dir / LATEST).strip()
    except (OSError, ValueError):
        named = run_dir
    if named.parent != run_dir / "checkpoints":  # no `latest`, or nothing that it could name
        if not known:
            return None, ""
        named = known[-1]
    if resume == "never":
        raise UserError("run.resume", resume, f"auto or last-good, as {named} is there; or another run.dir")
    problems = verify(named)
    if not problems:
        return named, ""
    before = _good_before(named)
    if resume == "last-good" and before is not None:
        return before, f"{named.name} is damaged ({problems[0]}): going on from {before.name}"
    raise damaged(named, problems)


def _good_before(folder: Path) -> Path | None:
    """The newest whole checkpoint of the run before this one."""
    known = reversed(list_checkpoints(folder.parent.parent))
    return next((other for other in known if other.name < folder.name and not verify(other)), None)


def damaged(folder: Path, problems: list[str]) -> UserError:
    """What is wrong with a checkpoint, and the one before it offered."""
    before = _good_before(folder)
    offer = "no other checkpoint is good"
    if before is not None:
        offer = f"run.resume=last-good goes on from {before.relative_to(folder.parent.parent)}"
    return UserError("checkpoint", Said(problems[0]), f"a whole checkpoint ({offer})", str(folder))


def put_aside(folder: Path) -> Path:
    """Rename a checkpoint before it is deleted, so that half a deletion leaves none that looks valid; the new path."""
    aside = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed
    folder.rename(aside)
    return aside


def finish_renames(run_dir: Path) -> None:
    """Give a checkpoint that was whole when its run was killed, and had no name then, its name; delete the rest of one
    whose deletion a kill cut short."""
    folder = run_dir / "checkpoints"
    for left in sorted(leftovers(folder)):  # of one step, `.partial` before the `.replaced` that it replaces
        final = left.with_name(left.stem[1:])
        if not final.exists() and not verify(left):
            left.rename(final)
        elif left.suffix == ".replaced":
            shutil.rmtree(left, ignore_errors=True)
    if folder.is_dir():
        sync_folder(folder)


def refuse_pickles(folder: Path) -> None:
    """Raises `UserError` where a folder holds tensors as pickles: reading one runs code that somebody else wrote."""
    names = [str(p.relative_to(folder)) for level in ("*", "*/*") for p in folder.glob(level) if p.suffix in PICKLES]
    found = sorted(names)
    if found:
        allowed = "safetensors: a pickle runs code when it is read, so it is not (convert it where you trust it)"
        raise UserError("checkpoint", Said(f"{found[0]}, a pickle"), allowed, str(folder))


def resolve_checkpoint(path: str | Path) -> tuple[Path, Path]:
    """(run folder, checkpoint folder) of a run folder or a checkpoint folder. Raises `UserError`."""
    path = Path(path)
    if read_manifest(path) is not None:
        problems = verify(path)
        if problems:
            raise UserError("checkpoint", Said(problems[0]), "a whole checkpoint", str(path))
        return path.parent.parent, path
    folder = latest_checkpoint(path)
    if folder is None:
        refuse_pickles(path)
        raise UserError(
            "checkpoint", str(path), "a run folder with `latest`, or a checkpoint folder with manifest.json"
        )
    return path, folder
