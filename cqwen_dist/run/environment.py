"""A run's environment: packages, machine, commit, ranks."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cqwen_dist.run.files import ENVIRONMENT, write_atomically

OPTIONAL = ("bitsandbytes",)
PACKAGES = ("cqwen-dist", "torch", "transformers", "peft", "deepspeed", "safetensors", *OPTIONAL)


@cache
def versions() -> dict[str, str]:
    """Installed versions of packages that affect results and files."""
    found = dict.fromkeys(PACKAGES, "not installed")
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def git_commit(folder: Path | None = None) -> str | None:
    """Commit of the folder's repository (default: the working directory), or None."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, cwd=folder)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def write_environment(folder: Path, world_size: int, details: dict[str, Any]) -> None:
    """Write environment.json. details: additional fields."""
    import torch  # the other modules here do not need it

    environment = {
        "python": sys.version.split()[0],
        "packages": versions(),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "ranks": world_size,
        "commit": git_commit(),
        "command": sys.argv,
        **details,
    }
    write_atomically(folder / ENVIRONMENT, json.dumps(environment, indent=1))
