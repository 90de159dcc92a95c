"""Weights that accelerate keeps on the CPU or a disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from transformers.utils import is_accelerate_available


@contextmanager
def at_hand(module: nn.Module) -> Iterator[None]:
    """Inside, weights that accelerate has offloaded to a disk or the CPU are on the device of the module."""
    with ExitStack() as stack:
        if not torch.compiler.is_compiling() and is_accelerate_available():  # otherwise no weight is offloaded
            from accelerate.utils import align_module_device

            for part in module.modules():
                stack.enter_context(align_module_device(part))
        yield
