"""Classes of failures: which rank, machine or input is at fault, and whether a retry may succeed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cqwen_dist.config.errors import DiskError, UserError
from cqwen_dist.parallel.collectives import is_communication

LOST_RANK = "a lost rank"


class Cause(NamedTuple):
    """A class of failures. passing: a retry may succeed, perhaps on different nodes; otherwise a fix is needed."""

    name: str
    passing: bool


class KnownFailure(RuntimeError):
    """A failure that knows its own class."""

    cause = Cause("the program", passing=False)


def cause_of(error: BaseException) -> Cause:
    """The class of a failure."""
    if isinstance(error, KnownFailure):
        return error.cause
    if isinstance(error, DiskError):
        return Cause("a file system that is away", True) if error.away else Cause("a disk that takes no more", False)
    if isinstance(error, UserError):
        return Cause("input", False)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Cause("memory", False)
    if is_communication(error):
        return Cause(LOST_RANK, True)
    text = str(error)
    signs = ("CUDA error", "ECC", "NVLink", "device is lost")
    if isinstance(error, RuntimeError) and any(sign in text for sign in signs) and "device-side assert" not in text:
        return Cause("a device", True)
    return Cause("the program", False)
