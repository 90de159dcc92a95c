"""Files that are not part of this repository: real vocabularies and data, used where they are at hand."""

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


def real_base(name: str = "smollm2-135m") -> Path:
    """A real base that `make base BASE=name` makes, or for the default $CQWEN_BASE; skips the test without it."""
    made = Path(__file__).resolve().parents[2] / "bases" / name
    path = Path(os.environ.get("CQWEN_BASE", made)) if name == "smollm2-135m" else made
    if not (path / "config.json").is_file():
        pytest.skip(f"no real base at hand: run `make base BASE={name}`")
    return path
