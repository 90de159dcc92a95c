"""ZeRO-1's and -2's gradients and step over flat buffers, in the place of DeepSpeed's loops over tensors.

An adapter set has hundreds of small tensors (338 in Qwen2.5-0.5B) and some MB. DeepSpeed hooks each of them, copies its
gradient into a bucket and from there into its partition, flattens that, and steps group by group. Here:

    after backward   all gradients into one flat tensor, over the number of ranks; one all-reduce
                     (ZeRO-1 after the last micro-batch, ZeRO-2 after each); micro-batches are summed in fp32
    the step         this rank's part in fp32: one norm, one clip, one fused AdamW, rounded into the weights;
                     one all-gather a parameter group

Partition, fp32 masters, moments and what a checkpoint holds stay DeepSpeed's.
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
    """Whether `FlatStep` serves a DeepSpeed optimizer: stage 1 or 2, its state on the device, buffers without gaps."""
    if not hasattr(optimizer, "single_partition_of_fp32_groups") or optimizer.cpu_offload:
        return False
    return not any(map(any, getattr(optimizer, "round_robin_bit16_padding", ())))


class FlatStep:
    """Replaces the methods of a DeepSpeed ZeRO-1 or -2 optimizer that reduce gradients, and that step."""

    def __init__(self, optimizer: Any, coefficient: Callable[[Tensor], float]) -> None:
        """coefficient: from the squared norm of the features' gradients [], over all ranks, to what clips them, at most
        1; where it raises, no parameter has changed."""
        self.optimizer, self.coefficient = optimizer, coefficient
        self.group = optimizer.dp_process_group
        self.size, self.rank = self.group.size(), self.group.rank()
        self.parts: dict[int, Tensor] = {}  # by parameter group: this rank's part of the gradients, fp32
        self.earlier: Tensor | None = None  # under ZeRO-1 in 16 bits: the sum of the micro-batches till now, fp32
        for hook in optimizer._grad_acc_hooks:
            hook.remove()
        optimizer._grad_acc_hooks.clear()
        optimizer.reduce_gradients = self.collect  # ZeRO-1's, of the last micro-batch
        optimizer.overlapping_partition_gradients_reduce_epilogue = self.collect  # ZeRO-2's, of every one
        optimizer.step = self.step

    @torch.no_grad()
    def add_up(self) -> None:
        """After a micro-batch that is not the last: its gradients in fp32. In 16 bits a small one would be lost."""
        if self.optimizer.partition_gradients or self.optimizer.dtype == torch.float32:
            return
        flat = self._taken().float()
        self.earlier = flat if self.earlier is None else self.earlier.add_(flat)

    @torch.no_grad()
    def collect(self, pipeline_parallel: bool = False) -> None:
        """Average all gradients over the ranks; add this rank's part to what it has."""
        flat = self._taken()
        if self.earlier is not None:
            flat = flat.copy_(self.earlier.add_(flat))
            self.earlier = None
        if self.size > 1:
            flat.div_(self.size)
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
        """The parameter groups that train, by number."""
        groups = enumerate(self.optimizer.round_robin_bit16_groups)
        return [(i, group) for i, group in groups if group[0].requires_grad]

    def _taken(self) -> Tensor:
        """The gradients of all that trains, flat, in the weights' dtype; the parameters have none any more."""
        parameters = [p for _, group in self._trained() for p in group]
        flat: Tensor = self.optimizer.flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        for p in parameters:
            p.grad = None
        return flat

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step of the groups that train."""
        parts, self.parts = self.parts, {}
        optimizer, gradients = self.optimizer, list(parts.values())
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
        optimizer.overflow = False
