"""The content of a checkpoint, and reading it: all that trains, by parameter name, in safetensors.

    checkpoints/step-00000200/
      adapter/                        LoRA in PEFT's own format                     whole, fp32
      features.safetensors            w_num, <NUM>'s row                            whole, fp32
      heads.safetensors               abduction, b_noise, regression, a scalar C    whole, fp32
      rows-00000000-00075968...       W_cls, b_cls, C of these rows                 one file a range
      *.moments.safetensors           AdamW's exp_avg and exp_avg_sq of each; of rows, a file for each owner's range
      state.json                      step, stage, Adam steps, position in the data
      manifest.json                   every file with size and checksum; written last

Nothing in it depends on the number of ranks, the vocabulary group's size or the ZeRO stage: rows are read by range. It
holds no state of random generators: the draws of a step follow from (seed, step, rank). It does not hold the frozen
backbone, which is the base model's.

state.json has digests of the run's inputs, so that none of them is exchanged unnoticed:

      tokenizer   the tokenizer with its policy of numbers
      base        config.json and every safetensors file of the base model
      data, eval  the training and the held-out texts as ids and values, in order, cut and packed
"""

from __future__ import annotations

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
from cqwen_dist.config import UserError
from cqwen_dist.config.errors import Said
from cqwen_dist.run.files import STATE, known_digest

Tensors = dict[str, Tensor]
# Files of rows [start, stop), and of their moments
ROWS, ROW_MOMENTS = (re.compile(rf"rows-(\d+)-(\d+){kind}\.safetensors") for kind in ("", r"\.moments"))
# Causes come first: another tokenizer also changes the ids of the same texts.
KEYS = {"tokenizer": "model.tokenizer", "base": "model.name_or_path", "data": "data.train", "eval": "data.eval"}
_NOUNS = {"tokenizer": "a tokenizer", "base": "a base model", "data": "training texts", "eval": "held-out texts"}


@dataclass
class TrainState:
    """The content of a checkpoint as one rank sees it: its own rows, everything else whole."""

    features: Tensors
    feature_moments: Tensors
    heads: Tensors
    head_moments: Tensors
    rows: Tensors
    row_moments: Tensors
    row_range: tuple[int, int]
    moment_range: tuple[int, int] = (0, 0)  # rows of `row_moments` that this rank saves
    state: dict[str, Any] = field(default_factory=dict)


def load_checkpoint(
    folder: Path, row_range: tuple[int, int], moment_ranges: Sequence[tuple[int, int]] | None = None
) -> TrainState:
    """Read a checkpoint and a range of its rows, whatever ranges were saved. Raises `UserError` for a damaged file.

    moment_ranges: of the rows' moments, in this order; None: those of `row_range`; empty: no moments at all.
    """
    wanted = [row_range] if moment_ranges is None else moment_ranges
    adapters = adapter.read_adapter(folder / adapter.FOLDER) if (folder / adapter.FOLDER).is_dir() else {}
    try:
        return TrainState(
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
    """Rows of each [start, stop), one range below the other, from those files of these names that overlap."""
    files = [(path, match) for path in sorted(folder.iterdir()) if (match := names.fullmatch(path.name))]
    parts: dict[str, list[Tensor]] = {}
    for start, stop in ranges:
        for path, match in files:
            first, end = int(match[1]), int(match[2])
            low, high = max(start, first), min(stop, end)
            if low < high:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
                        parts.setdefault(name, []).append(file.get_slice(name)[low - first : high - first])
    return {name: torch.cat(pieces) for name, pieces in parts.items()}


def base_digest(folder: Path, memo: Path) -> str:
    """SHA-256 of a base model's files. memo: a folder that keeps the digests of unchanged files."""
    files = sorted([folder / "config.json", *folder.glob("*.safetensors")])
    return hashlib.sha256("".join(known_digest(file, memo) for file in files).encode()).hexdigest()


def refuse_exchanged(
    saved: Mapping[str, str], found: Mapping[str, str], accept: Sequence[str], source: object
) -> list[str]:
    """The names of inputs that differ from the saved ones. Raises `UserError` for one that `accept` does not name.

    saved: digests from a checkpoint; one of an older version has none. source: the checkpoint, for the error.
    """
    exchanged = [name for name in KEYS if name in saved and name in found and saved[name] != found[name]]
    for name in exchanged:
        if name not in accept:
            allowed = f"the same, or run.accept: [{', '.join(exchanged)}] to go on with what is here now"
            raise UserError(KEYS[name], Said(f"{_NOUNS[name]} other than in the checkpoint"), allowed, str(source))
    return exchanged
