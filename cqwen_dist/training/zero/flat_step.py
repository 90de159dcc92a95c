"""Gradients and step of ZeRO-1 and ZeRO-2 over flat buffers. Replaces DeepSpeed's loops over tensors.

An adapter set has hundreds of small tensors (338 in Qwen2.5-0.5B) and a few MB. DeepSpeed hooks each tensor, copies its
gradient into a bucket and then into the partition, flattens the partition, and steps group by group. Here:

    after backward   all gradients in one flat tensor, divided by the number of ranks; one all-reduce
                     (ZeRO-1 after the last micro-batch, ZeRO-2 after each); micro-batches are summed in fp32
    the step         this rank's part in fp32: one norm, one clip, one fused AdamW, rounded into the weights;
                     one all-gather per parameter group

DeepSpeed still has the partition, the fp32 masters, the moments and the checkpoint content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cqwen_dist.parallel.collectives import all_gather_into, sum_over
from cqwen_dist.training.optim import norm_sq


def is_flat(optimizer: Any) -> bool:
    """Whether `FlatStep` supports a DeepSpeed optimizer: stage 1 or 2, state on the device, buffers without gaps."""
    if not hasattr(optimizer, "single_partition_of_fp32_groups") or optimizer.cpu_offload:
        return False
    return not any(map(any, getattr(optimizer, "round_robin_bit16_padding", ())))


class FlatStep:
    """Replaces the methods of a DeepSpeed ZeRO-1 or ZeRO-2 optimizer that reduce gradients and step."""

    def __init__(self, optimizer: Any, coefficient: Callable[[Tensor], float]) -> None:
        """coefficient: maps the squared feature gradient norm [] over all ranks to the clip factor, at most 1. It may
        raise; no parameter has changed then."""
        self.optimizer, self.coefficient = optimizer, coefficient
        self.group = optimizer.dp_process_group
        self.size, self.rank = self.group.size(), self.group.rank()
        self.parts: dict[int, Tensor] = {}  # this rank's part of the gradients by parameter group, fp32
        self.earlier: Tensor | None = None  # under ZeRO-1 in 16 bits: fp32 sum of the micro-batches so far
        # DeepSpeed's hooks would move each gradient into its own buckets before `collect` sees it
        for hook in optimizer._grad_acc_hooks:
            hook.remove()
        optimizer._grad_acc_hooks.clear()
        optimizer.reduce_gradients = self.collect  # ZeRO-1 calls this after the last micro-batch
        optimizer.overlapping_partition_gradients_reduce_epilogue = self.collect  # ZeRO-2 calls this after each
        optimizer.step = self.step

    @torch.no_grad()
    def add_up(self) -> None:
        """Add the gradients of a micro-batch before the last in fp32; a 16-bit sum would lose small gradients."""
        if self.optimizer.partition_gradients or self.optimizer.dtype == torch.float32:
            return
        flat = self._taken().float()
        self.earlier = flat if self.earlier is None else self.earlier.add_(flat)

    @torch.no_grad()
    def collect(self, pipeline_parallel: bool = False) -> None:
        """Average all gradients over the ranks and add this rank's part to `parts`."""
        flat = self._taken()
        if self.earlier is not None:
            flat = flat.copy_(self.earlier.add_(flat))
            self.earlier = None
        if self.size > 1:
            flat.div_(self.size)
            # In pieces of DeepSpeed's bucket size, so that its setting still bounds the size of a transfer
            for bucket in flat.split(self.optimizer.reduce_bucket_size):
                sum_over(bucket, self.group)
        trained = self._trained()
        sizes = [sum(p.numel() for p in group) for _, group in trained]
        for (i, _), whole in zip(trained, flat.split(sizes), strict=True):
            share = self.optimizer.single_partition_of_fp32_groups[i].numel()
            part = whole[self.rank * share : (self.rank + 1) * share].float()
            part = F.pad(part, (0, share - len(part)))
            self.parts[i] = self.parts[i] + part if i in self.parts else part

    def _trained(self) -> list[tuple[int, list[Tensor]]]:
        """(index, parameters) of the parameter groups that train."""
        groups = enumerate(self.optimizer.round_robin_bit16_groups)
        return [(i, group) for i, group in groups if group[0].requires_grad]

    def _taken(self) -> Tensor:
        """Flatten all trained gradients in the weight dtype and clear them on the parameters."""
        parameters = [p for _, group in self._trained() for p in group]
        flat: Tensor = self.optimizer.flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        for p in parameters:
            p.grad = None
        return flat

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step the groups that train."""
        parts, self.parts = self.parts, {}
        optimizer, gradients = self.optimizer, list(parts.values())
        # All-reduce of one number; `coefficient` adds the heads' norm and raises before any parameter changes
        coefficient = self.coefficient(sum_over(norm_sq(gradients, gradients[0].device), self.group))
        if coefficient < 1.0:
            torch._foreach_mul_(gradients, coefficient)
        masters = [optimizer.single_partition_of_fp32_groups[i] for i in parts]
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        optimizer.optimizer.step()
        optimizer.optimizer.zero_grad(set_to_none=True)
        own = [optimizer.parallel_partitioned_bit16_groups[i][self.rank] for i in parts]
        torch._foreach_copy_(own, masters)
        if self.size > 1:
            for i, mine in zip(parts, own, strict=True):
                all_gather_into(optimizer.bit16_groups_flat[i], mine, self.group)
        # DeepSpeed asks for it after the step; the norm was finite, or `coefficient` would have raised
        optimizer.overflow = False
