"""Save and load of everything that trains: by parameter name, in safetensors, no pickle.

    checkpoints/step-00000200/
      features.safetensors        adapters, w_num, <NUM>'s row                      whole, fp32
      heads.safetensors           abduction, b_noise, regression, a scalar C         whole, fp32
      rows-00000000-00075968...   W_cls, b_cls, C of these rows of the vocabulary    one file a range
      *.moments.safetensors       AdamW's exp_avg and exp_avg_sq beside each
      state.json                  step, stage, Adam steps, position in the data
      manifest.json               every file with size and checksum; written last

Nothing in it depends on the number of ranks, the vocabulary group's size or the ZeRO stage: rows are read back by
range. The frozen backbone is not in it (it is the base model's).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cqwen_dist.checkpoint.manifest import (
    FORMAT,
    LATEST,
    MANIFEST,
    checkpoint_folder,
    file_record,
    git_commit,
    list_checkpoints,
    sync_folder,
    versions,
    write_atomically,
)
from cqwen_dist.config import UserError
from cqwen_dist.parallel.collectives import barrier, gather_objects
from cqwen_dist.parallel.groups import Groups

Tensors = dict[str, Tensor]


@dataclass
class TrainState:
    """What a checkpoint holds, as one rank sees it (its rows; the rest whole)."""

    features: Tensors
    feature_moments: Tensors
    heads: Tensors
    head_moments: Tensors
    rows: Tensors
    row_moments: Tensors
    row_range: tuple[int, int]
    state: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(run_dir: Path, step: int, state: TrainState, groups: Groups, keep: int) -> Path:
    """Write a checkpoint; collective over the world. It exists whole under its name or not at all.

    Written beside, fsynced, manifest last, renamed; then `latest` moves and checkpoints older than the newest `keep`
    go. Every rank of replica 0 writes its rows; rank 0 the rest.
    """
    final = checkpoint_folder(run_dir, step)
    beside = final.with_name(f".{final.name}.partial")
    main = groups.world.rank() == 0
    if main:
        for partial in final.parent.glob(".step-*.partial"):  # of a run that was killed
            shutil.rmtree(partial)
        beside.mkdir(parents=True)
    barrier()
    files: dict[str, Tensors] = {}
    if groups.replica.rank() == 0 and state.row_range[1] > state.row_range[0]:
        name = f"rows-{state.row_range[0]:08d}-{state.row_range[1]:08d}"
        files[f"{name}.safetensors"] = state.rows
        files[f"{name}.moments.safetensors"] = state.row_moments
    if main:
        files["features.safetensors"] = state.features
        files["features.moments.safetensors"] = state.feature_moments
        files["heads.safetensors"] = state.heads
        files["heads.moments.safetensors"] = state.head_moments
    records = {name: _write(beside / name, tensors) for name, tensors in files.items()}
    gathered = gather_objects(records)
    if main:
        write_atomically(beside / "state.json", json.dumps(state.state, indent=1))
        records = {name: record for part in gathered for name, record in part.items()}
        records["state.json"] = file_record(beside / "state.json")
        manifest = {
            "format": FORMAT,
            "step": step,
            "stage": state.state.get("stage"),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "files": records,
            "versions": versions(),
            "commit": git_commit(),
        }
        write_atomically(beside / MANIFEST, json.dumps(manifest, indent=1))
        if final.exists():  # the same step again, after a resume from before it
            shutil.rmtree(final)
        beside.rename(final)
        sync_folder(final.parent)
        write_atomically(run_dir / LATEST, str(final.relative_to(run_dir)) + "\n")
        # Later ones are of a run that was set back to an earlier checkpoint: no reason to drop the one just written.
        for old in [folder for folder in list_checkpoints(run_dir) if folder.name <= final.name][:-keep]:
            shutil.rmtree(old)
    barrier()
    return final


def _write(path: Path, tensors: Tensors) -> dict[str, Any]:
    """Save, fsync and check: a tensor of shape (0,) is how a sharded optimizer loses an adapter."""
    ready = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    empty = [name for name, t in ready.items() if t.numel() == 0]
    if empty:
        raise RuntimeError(f"{path.name}: {empty[0]} is empty; nothing was saved")
    save_file(ready, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return file_record(path)


def load_checkpoint(folder: Path, row_range: tuple[int, int], moments: bool = True) -> TrainState:
    """Read a checkpoint, the rows by range whatever ranges were saved. Raises `UserError` for a damaged file."""
    try:
        return TrainState(
            features=load_file(folder / "features.safetensors"),
            feature_moments=load_file(folder / "features.moments.safetensors") if moments else {},
            heads=load_file(folder / "heads.safetensors"),
            head_moments=load_file(folder / "heads.moments.safetensors") if moments else {},
            rows=_load_rows(folder, row_range, ".safetensors"),
            row_moments=_load_rows(folder, row_range, ".moments.safetensors") if moments else {},
            row_range=row_range,
            state=json.loads((folder / "state.json").read_text(encoding="utf-8")),
        )
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError("checkpoint", str(folder), f"files that can be read ({error})") from None


def _load_rows(folder: Path, row_range: tuple[int, int], suffix: str) -> Tensors:
    """Rows [start, stop) out of the range files that hold them."""
    start, stop = row_range
    parts: dict[str, list[Tensor]] = {}
    for path in sorted(folder.glob("rows-*" + suffix)):
        match = re.fullmatch(r"rows-(\d+)-(\d+)" + re.escape(suffix), path.name)
        if match is None:
            continue
        low, high = max(start, int(match[1])), min(stop, int(match[2]))
        if low >= high:
            continue
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
                parts.setdefault(name, []).append(file.get_slice(name)[low - int(match[1]) : high - int(match[1])])
    return {name: torch.cat(pieces) for name, pieces in parts.items()}
