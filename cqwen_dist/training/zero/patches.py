"""Replaces methods of DeepSpeed's ZeRO optimizers (`tests/training/test_deepspeed_names.py` lists the names)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.parallel.collectives import sum_over
from cqwen_dist.training.optim import norm_sq


def patch_norm(optimizer: Any, over_limit: Callable[[Tensor], float]) -> None:
    """Clip by the joint norm of features and heads where `flat_step` does not serve: ZeRO-3, an offloaded optimizer.

    over_limit: from the features' squared norm [], NaN where it is not finite, to the joint norm over its limit. That
    goes to DeepSpeed as a tensor on the host: DeepSpeed reads it in each step, and would wait for the device.
    """

    def joint(norms: list[Any]) -> Tensor:
        found = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in norms])
        return torch.tensor(over_limit(torch.where(found < 0, torch.nan, found).square().sum()))

    def norm(gradients: Iterable[Tensor], params: Any, norm_type: float = 2) -> Tensor:
        """The norm over the ranks of this group's gradients, without a look at each tensor."""
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
    """Let ZeRO-3 record its order of modules anew; called before the first forward pass with gradients.

    It records the first pass of all. If that has no backward pass (the start's fits), DeepSpeed finds it wrong in the
    middle of the first backward pass, and from then on every step gathers all frozen weights once more.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is not None and not (coordinator := offload.get_param_coordinator()).is_invalid_trace():
        coordinator._invalidate_trace()


def skip_frozen_groups(optimizer: torch.optim.Optimizer) -> None:
    """Hide the gradients of groups marked `frozen` during the step: DeepSpeed gives zeros, and Adam would step.

    They are put back afterwards, as DeepSpeed keeps one buffer for them with an offloaded optimizer.
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
