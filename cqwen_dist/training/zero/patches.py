"""Replaces methods of DeepSpeed's ZeRO optimizers (`tests/training/test_deepspeed_names.py` lists the names)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.parallel.collectives import sum_over


def patch_clip(optimizer: Any, over_limit: Callable[[Any], Tensor]) -> None:
    """Clip by the joint norm of features and heads. DeepSpeed calls its clipping for each parameter group.

    over_limit: from DeepSpeed's norm of the features (-1: not finite) to the joint norm divided by its limit.
    """
    clip = optimizer.unscale_and_clip_grads
    optimizer.unscale_and_clip_grads = lambda gradients, total_norm: clip(gradients, over_limit(total_norm))


def patch_tensor_loops(optimizer: Any) -> None:
    """Turn DeepSpeed's loops over tensors into a few kernels, with the same results.

    A LoRA run has hundreds of small tensors (14 per layer). For each one DeepSpeed checks whether it is finite, takes
    its norm and sets its storage again: about twenty kernels and as many Python calls. On an H200 that is 65 ms of a
    step whose products take 60 ms (Qwen2.5-0.5B, 8,192 tokens). Only a ZeRO-1 or -2 optimizer with its state on the
    device is patched.
    """
    if not hasattr(optimizer, "single_partition_of_fp32_groups") or optimizer.cpu_offload:
        return

    def norm(gradients: Iterable[Tensor], params: Any, norm_type: float = 2) -> Tensor:
        """The norm over the ranks of this group's gradients; -1 where it is not finite, as in DeepSpeed."""
        own = [g.detach() for g in gradients if not getattr(g, "_zero_padding", False)]
        device = optimizer.device
        wide = torch.float32 if torch.device(device).type == "cuda" else torch.float64
        total = torch.zeros((), device=device)
        if own:
            total = torch.stack(torch._foreach_norm(own, norm_type, dtype=wide)).square().sum().float()
        total = sum_over(total, optimizer.dp_process_group).sqrt()
        return torch.where(total.isfinite(), total, -1.0)

    def check(partition_gradients: bool = True) -> None:
        """Nothing to check: the norm, checked next by all ranks alike, is not finite where any gradient is not."""
        optimizer.overflow = False

    def update(group_index: int) -> None:
        """Nothing to copy: the parameters are views of the flat buffer, and a step writes into it."""

    optimizer.get_grad_norm_direct = norm
    optimizer.check_overflow = check
    optimizer._update_model_bit16_weights = update


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
