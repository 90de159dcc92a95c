"""Joins DeepSpeed to the run's process group, and replaces methods of its ZeRO optimizers.

`FlatStep` replaces its loops over tensors in ZeRO-1 and ZeRO-2. An adapter set has hundreds of small tensors (338 in
Qwen2.5-0.5B) and a few MB.
DeepSpeed hooks each tensor, copies its gradient into a bucket and then into the partition, flattens the partition, and
steps group by group. Here:

    after backward   all gradients in one flat tensor, divided by the number of ranks; one all-reduce
                     (ZeRO-1 after the last micro-batch, ZeRO-2 after each); micro-batches are summed in fp32
    the step         this rank's part in fp32: one norm, one clip, one fused AdamW, rounded into the weights;
                     one all-gather per parameter group

DeepSpeed still has the partition, the fp32 masters, the moments and the checkpoint content.
"""

import atexit
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor

from cqwen_dist.parallel.collectives import all_gather_into, sum_over
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
    atexit.register(setattr, groups, "_WORLD_GROUP", None)  # its threads would live on: see `parallel.runtime`
    # DeepSpeed's engine imports Muon, which is decorated with torch.compile: inductor's import takes more than a second
    with patch.object(deepspeed.runtime.compiler, "compile", lambda: deepspeed.runtime.compiler.dummy_decorator):
        import_module("deepspeed.runtime.zero.muon.original_muon")


def patch_norm(optimizer: Any, over_limit: Callable[[Tensor], float]) -> None:
    """Clip by the joint norm of features and heads. For ZeRO-3 and offloaded optimizers, which `FlatStep` cannot do.

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


def is_flat(optimizer: Any) -> bool:
    """Whether `FlatStep` supports a DeepSpeed optimizer: stage 1 or 2, state on the device, buffers without gaps.

    With `overlap_comm`, DeepSpeed's own hooks reduce the gradients, during the backward pass.
    """
    if not hasattr(optimizer, "single_partition_of_fp32_groups") or optimizer.cpu_offload or optimizer.overlap_comm:
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

    def _gather(self, whole: Tensor, mine: Tensor) -> None:
        """All-gather the parts of a group, in pieces of DeepSpeed's bucket size."""
        piece = max(1, self.optimizer.allgather_bucket_size // self.size)
        if piece >= len(mine):
            return all_gather_into(whole, mine, self.group)
        for columns, part in zip(whole.view(self.size, -1).split(piece, 1), mine.split(piece), strict=True):
            gathered = torch.empty_like(columns, memory_format=torch.contiguous_format)
            all_gather_into(gathered.view(-1), part.clone(), self.group)  # `part` is in `whole`
            columns.copy_(gathered)

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
                self._gather(optimizer.bit16_groups_flat[i], mine)
        # DeepSpeed asks for it after the step; the norm was finite, or `coefficient` would have raised
        optimizer.overflow = False
