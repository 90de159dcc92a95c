"""A checkpoint's content, and reading it: everything that trains, by parameter name, in safetensors.

    checkpoints/step-00000200/
      adapter/                        LoRA in PEFT's format                         unsharded, fp32
      features.safetensors            w_num, <NUM>'s row                            unsharded, fp32
      heads.safetensors               abduction, b_noise, regression, a scalar C    unsharded, fp32
      rows-00000000-00075968...       W_cls, b_cls, C for these rows                one file per range
      *.moments.safetensors           AdamW's exp_avg and exp_avg_sq; for rows, one file per owner's range
      state.json                      step, stage, Adam steps, position in the data
      manifest.json                   every file with size and checksum; written last

Nothing depends on the number of ranks, the vocabulary group's size or the ZeRO stage, because rows are read by range.
There is no random generator state: a step's draws follow from (seed, step, rank). The frozen backbone is not saved; it
comes from the base model.

state.json has digests of the run's inputs, so a changed input is detected:

      tokenizer   the tokenizer with its number policy
      base        config.json and every safetensors file of the base model
      data, eval  training and held-out texts as ids and values, in order, cut and packed
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from cqwen_dist.checkpoint import adapter
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.run.files import STATE, known_digest

Tensors = dict[str, Tensor]
# Files with rows [start, stop), and with their moments
ROWS, ROW_MOMENTS = (re.compile(rf"rows-(\d+)-(\d+){kind}\.safetensors") for kind in ("", r"\.moments"))
# Causes come first: a changed tokenizer also changes the data's ids.
KEYS = {"tokenizer": "model.tokenizer", "base": "model.name_or_path", "data": "data.train", "eval": "data.eval"}
_NOUNS = {"tokenizer": "a tokenizer", "base": "a base model", "data": "training texts", "eval": "held-out texts"}


@dataclass
class TrainState:
    """A checkpoint's content on one rank: this rank's rows, everything else unsharded."""

    features: Tensors
    feature_moments: Tensors
    heads: Tensors
    head_moments: Tensors
    rows: Tensors
    row_moments: Tensors
    row_range: tuple[int, int]
    moment_range: tuple[int, int] = (0, 0)  # rows whose moments this rank saves
    state: dict[str, Any] = field(default_factory=dict)


def load_checkpoint(
    folder: Path, row_range: tuple[int, int], moment_ranges: Sequence[tuple[int, int]] | None = None
) -> TrainState:
    """Read a checkpoint with a range of rows, independent of the saved ranges. Raises `UserError` for a damaged file.

    moment_ranges: rows whose moments are read, in this order; None: `row_range`; empty: no moments at all.
    """
    wanted = [row_range] if moment_ranges is None else moment_ranges
    adapters = adapter.read_adapter(folder / adapter.FOLDER) if (folder / adapter.FOLDER).is_dir() else {}
    try:
        return TrainState(
            # Adapters lie apart in PEFT's format, so that other libraries can load them
            features=load_file(folder / "features.safetensors") | adapters,
            feature_moments=load_file(folder / "features.moments.safetensors") if wanted else {},
            heads=load_file(folder / "heads.safetensors"),
            head_moments=load_file(folder / "heads.moments.safetensors") if wanted else {},
            rows=_load_rows(folder, [row_range], ROWS),
            row_moments=_load_rows(folder, wanted, ROW_MOMENTS),
            row_range=row_range,
            state=json.loads((folder / STATE).read_text(encoding="utf-8")),
        )
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError("checkpoint", str(folder), f"files that can be read ({error})") from None


def _load_rows(folder: Path, ranges: Sequence[tuple[int, int]], names: re.Pattern[str]) -> Tensors:
    """Read rows [start, stop) of each range, concatenated in order, from all matching files that overlap."""
    files = [(path, match) for path in sorted(folder.iterdir()) if (match := names.fullmatch(path.name))]
    parts: dict[str, list[Tensor]] = {}
    for start, stop in ranges:
        for path, match in files:
            first, end = int(match[1]), int(match[2])
            # Read only the overlap with this file: the saved partition need not match the current one.
            low, high = max(start, first), min(stop, end)
            if low < high:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
                        parts.setdefault(name, []).append(file.get_slice(name)[low - first : high - first])
    return {name: torch.cat(pieces) for name, pieces in parts.items()}


def base_digest(folder: Path, memo: Path) -> str:
    """SHA-256 over a base model's files. memo: cache folder for digests of unchanged files."""
    files = sorted([folder / "config.json", *folder.glob("*.safetensors")])
    return hashlib.sha256("".join(known_digest(file, memo) for file in files).encode()).hexdigest()


def refuse_exchanged(
    saved: Mapping[str, str], found: Mapping[str, str], accept: Sequence[str], source: object, way_out: str = ""
) -> list[str]:
    """Names of inputs that differ from the saved ones. Raises `UserError` if `accept` lacks one of them.

    saved: digests from a checkpoint. source: the checkpoint, for the error.
    way_out: for the error, instead of `run.accept`.
    """
    exchanged = [name for name in KEYS if name in saved and name in found and saved[name] != found[name]]
    for name in exchanged:
        if name not in accept:
            instead = way_out or f"run.accept: [{', '.join(exchanged)}] to continue with the present files"
            found_here = Said(f"{_NOUNS[name]} other than in the checkpoint")
            raise UserError(KEYS[name], found_here, f"the same, or {instead}", str(source))
    return exchanged


def refuse_strange(
    found: Mapping[str, Tensor],
    wanted: Mapping[str, torch.Size],
    where: object,
    *,
    key: str = "checkpoint",
    dtype: torch.dtype | None = torch.float32,
    all_of_them: bool = True,
) -> None:
    """Check tensors before they are copied by name: a copy could silently broadcast, cast or skip one.

    wanted: shapes by name. dtype: None allows any float. all_of_them: False allows missing tensors. Raises `UserError`
    naming a tensor that is missing, unknown or not finite, or has a wrong shape or dtype.
    """
    whole = "every tensor of the model that its config describes, and no other"
    if all_of_them and (missing := sorted(wanted.keys() - found.keys())):
        raise UserError(key, Said(f"no {missing[0]}"), whole, str(where))
    if unknown := sorted(found.keys() - wanted.keys()):
        raise UserError(key, Said(f"{unknown[0]}, which is no part of the model"), whole, str(where))
    for name, value in found.items():
        if value.shape != wanted[name]:
            raise UserError(key, Said(f"{name} of shape {list(value.shape)}"), f"{list(wanted[name])}", str(where))
        if value.dtype != dtype if dtype is not None else not value.is_floating_point():
            allowed = "a float" if dtype is None else str(dtype).removeprefix("torch.")
            raise UserError(key, Said(f"{name} of {str(value.dtype).removeprefix('torch.')}"), allowed, str(where))
        if not bool(value.isfinite().all()):
            raise UserError(key, Said(f"{name} with a NaN or an infinity"), "finite numbers", str(where))
