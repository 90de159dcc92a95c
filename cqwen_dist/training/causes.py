"""Why a run failed, and whether another try may go on: for status.json and for requeueing a job."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError

from cqwen_dist.config import UserError
from cqwen_dist.config.errors import DiskError, Said
from cqwen_dist.parallel.collectives import is_communication
from cqwen_dist.run.files import AWAY, REFUSED, words_of_disk
from cqwen_dist.training.replicas import RanksDiffer
from cqwen_dist.training.zero.engine import NonFiniteStep


class Cause(NamedTuple):
    """A class of failures. passing: the same command, perhaps on other nodes, may go on; else a fix is needed first."""

    name: str
    passing: bool


RANK = Cause("a lost rank", True)
AWAY_DISK = Cause("a file system that is away", True)
REFUSING_DISK = Cause("a disk that takes no more", False)
DEVICE = Cause("a device", True)
MEMORY = Cause("memory", False)
CORRUPTION = Cause("ranks that differ", True)
LASTING_CORRUPTION = Cause("ranks that differ again", False)
DIVERGED = Cause("a loss that is not finite", False)
INPUT = Cause("input", False)
PROGRAM = Cause("the program", False)

_DEVICE_SIGNS = ("CUDA error", "ECC", "NVLink", "device is lost")
_PROGRAM_SIGNS = ("device-side assert",)


def cause_of(error: BaseException) -> Cause:
    """The class of a failure."""
    if isinstance(error, DiskError):
        return AWAY_DISK if error.away else REFUSING_DISK
    if isinstance(error, UserError):
        return INPUT
    if isinstance(error, RanksDiffer):
        return LASTING_CORRUPTION if error.again else CORRUPTION
    if isinstance(error, NonFiniteStep):
        return DIVERGED
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return MEMORY
    if is_communication(error):
        return RANK
    text = str(error)
    of_device = isinstance(error, RuntimeError) and any(sign in text for sign in _DEVICE_SIGNS)
    return DEVICE if of_device and not any(sign in text for sign in _PROGRAM_SIGNS) else PROGRAM


def of_disk(error: Exception, folder: Path) -> DiskError | None:
    """A disk's failure as a `DiskError`, in one line; None for other failures."""
    if not isinstance(error, SafetensorError) and not (isinstance(error, OSError) and error.errno in REFUSED + AWAY):
        return None
    place, message, away = words_of_disk(error, folder)
    allowed = "a disk that can be read and written; then the same command goes on"
    return DiskError("run.dir", Said(message), allowed, place, away)
