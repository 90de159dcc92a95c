"""Digests of a run's inputs. A checkpoint holds them, so that no input is exchanged unnoticed.

data        the training texts as ids and values, in order, cut and packed
eval        the held-out texts, likewise
tokenizer   the tokenizer with its policy of numbers
base        config.json and every safetensors file of the base model
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from cqwen_dist.config import UserError
from cqwen_dist.config.errors import Said
from cqwen_dist.run.files import known_digest

# Causes come first: another tokenizer also changes the ids of the same texts.
KEYS = {"tokenizer": "model.tokenizer", "base": "model.name_or_path", "data": "data.train", "eval": "data.eval"}
_NOUNS = {"tokenizer": "a tokenizer", "base": "a base model", "data": "training texts", "eval": "held-out texts"}


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
