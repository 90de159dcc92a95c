"""Joins DeepSpeed to the run's process group, and replaces methods of its ZeRO optimizers.

`tests/training/test_deepspeed_names.py` lists the names of DeepSpeed that are used here.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from torch import Tensor

from cqwen_dist.parallel.collectives import sum_over
from cqwen_dist.training.optim import norm_sq


def join_deepspeed() -> None:
    """Let DeepSpeed use the current process group, not a destroyed one from an earlier run of this process.

    Collective over the world: DeepSpeed makes its copy of the world's group here.
    """
    # DeepSpeed asks this table only for its collective on CPUs (gloo is enough), and fills it by trying C compilers.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
    groups = deepspeed.utils.groups
    try:
        deepspeed.comm.get_global_rank(groups._WORLD_GROUP, 0)
    except ValueError:  # torch has destroyed this group
        groups._WORLD_GROUP = None
    groups._get_data_parallel_group()
    atexit.register(_leave_deepspeed)
    # DeepSpeed's engine imports Muon, which is decorated with torch.compile: inductor's import takes more than a second
    with patch.object(deepspeed.runtime.compiler, "compile", lambda: deepspeed.runtime.compiler.dummy_decorator):
        import_module("deepspeed.runtime.zero.muon.original_muon")


def _leave_deepspeed() -> None:
    deepspeed.utils.groups._WORLD_GROUP = None  # its threads would live on: see `parallel.runtime.distributed`


def patch_norm(optimizer: Any, over_limit: Callable[[Tensor], float]) -> None:
    """Clip by the joint norm of features and heads. For ZeRO-3 and offloaded optimizers, which `flat_step` cannot do.

    over_limit: maps the squared feature norm [] (NaN if not finite) to the joint norm divided by its limit. DeepSpeed
    gets the result as a host tensor: it reads the value in each step, and a device tensor would synchronise again.
    """

    def joint(norms: list[Any]) -> Tensor:
        # DeepSpeed reports a norm that is not finite as -1
        found = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in norms])
        return torch.tensor(over_limit(torch.where(found < 0, torch.nan, found).square().sum()))

    def norm(gradients: Iterable[Tensor], params: Any, norm_type: float = 2) -> Tensor:
        """Gradient norm of this group over all ranks. DeepSpeed's version checks each tensor on the host."""
        own = list(gradients)
        return sum_over(norm_sq(own, own[0].device), optimizer.dp_process_group).sqrt()

    if hasattr(optimizer, "_get_norm_groups"):  # ZeRO-3
        groups = optimizer._get_norm_groups
        optimizer._get_norm_groups = lambda: [joint(groups())]
        optimizer.get_grad_norm_direct = norm
    else:
        whole = optimizer.scaled_global_norm
        optimizer.scaled_global_norm = lambda norm_type=2: joint([whole()])


def forget_trace(engine: Any) -> None:
    """Make ZeRO-3 record its module order again. Call before the first forward pass with gradients.

    ZeRO-3 records the first pass. If that pass has no backward (fits at the start), DeepSpeed finds a mismatch during
    the first backward pass, and from then on each step gathers all frozen weights twice.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is not None and not (coordinator := offload.get_param_coordinator()).is_invalid_trace():
        coordinator._invalidate_trace()


def skip_frozen_groups(optimizer: torch.optim.Optimizer) -> None:
    """Hide the gradients of groups marked `frozen` during the step. DeepSpeed passes zeros, and Adam would still move.

    They are restored afterwards, since DeepSpeed reuses this gradient buffer for an offloaded optimizer.
    """
    held: list[tuple[Tensor, Tensor | None]] = []

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            if group.get("frozen"):
                for parameter in group["params"]:
                    held.append((parameter, parameter.grad))
                    parameter.grad = None

    def after(*_: Any) -> None:
        while held:
            parameter, gradient = held.pop()
            parameter.grad = gradient

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
