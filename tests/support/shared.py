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
