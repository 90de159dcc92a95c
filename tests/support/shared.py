"""Files that are not part of this repository: real vocabularies and data, used where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).resolve().parents[2].parent / "shared"


def shared_path(relative: str) -> Path:
    """A file or folder under $CQWEN_SHARED (default: `shared` beside the repository); skips the test without it."""
    path = Path(os.environ.get("CQWEN_SHARED", _BESIDE)) / relative
    if not path.exists():
        pytest.skip(f"{relative} is not at hand: set CQWEN_SHARED to the folder that holds it")
    return path


def real_base() -> Path:
    """A real base: $CQWEN_BASE, or what `make base` makes; skips the test without it."""
    made = Path(__file__).resolve().parents[2] / "bases" / "smollm2-135m"
    path = Path(os.environ.get("CQWEN_BASE", made))
    if not (path / "config.json").is_file():
        pytest.skip("no real base at hand: run `make base`, or set CQWEN_BASE to a folder with one")
    return path
