"""What a run learns from, as digests: a checkpoint holds them, so that none of it is exchanged unnoticed.

data        the training texts as ids and values, in order, and how they are cut and packed
eval        the same of the held-out texts
tokenizer   what turns text into ids and values, the policy of numbers among it
base        config.json and every safetensors file of the base model
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from cqwen_dist.config import UserError
from cqwen_dist.config.errors import Said
from cqwen_dist.run.files import known_digest

# A cause before what follows from it: another tokenizer makes other ids of the same texts.
KEYS = {"tokenizer": "model.tokenizer", "base": "model.name_or_path", "data": "data.train", "eval": "data.eval"}
_NOUNS = {"tokenizer": "a tokenizer", "base": "a base model", "data": "training texts", "eval": "held-out texts"}


def base_digest(folder: Path, memo: Path) -> str:
    """SHA-256 of a base model's files. memo: the folder that remembers digests of files that have not changed."""
    files = sorted([folder / "config.json", *folder.glob("*.safetensors")])
    return hashlib.sha256("".join(known_digest(file, memo) for file in files).encode()).hexdigest()


def refuse_exchanged(
    saved: Mapping[str, str], found: Mapping[str, str], accept: Sequence[str], source: object
) -> list[str]:
    """The inputs in `found` that are not what was saved and that `accept` names; one that it does not is a `UserError`.

    saved: digests out of a checkpoint; none in one of an older version. source: the checkpoint, for the error.
    """
    exchanged = [name for name in KEYS if name in saved and name in found and saved[name] != found[name]]
    for name in exchanged:
        if name not in accept:
            allowed = f"the same, or run.accept: [{', '.join(exchanged)}] to go on with what is here now"
            raise UserError(KEYS[name], Said(f"{_NOUNS[name]} other than in the checkpoint"), allowed, str(source))
    return exchanged
