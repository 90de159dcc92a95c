"""How evenly the routers of a mixture choose among its experts. The routers themselves are frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ROUTER = ".mlp.gate"  # the end of a router's name


class ExpertLoad:
    """Counts the tokens of each expert in training passes, [layers, experts], without waiting for the device."""

    def __init__(self, transformer: nn.Module) -> None:
        routers = [module for name, module in transformer.named_modules() if name.endswith(ROUTER)]
        sizes: Any = [getattr(module, "num_experts", 0) for module in routers]
        self.counts = torch.zeros(len(routers), max(sizes, default=0))
        self.real = torch.ones(0)  # [N]: which tokens of the batch count; padding does not
        for row, router in enumerate(routers):
            router.register_forward_hook(lambda module, _, output, row=row: self._add(module, output[2], row))

    def _add(self, router: nn.Module, chosen: Tensor, row: int) -> None:
        """chosen [N,k]: the experts of each token."""
        if router.training and torch.is_grad_enabled():  # not the start's pass for the constraint
            self.counts, real = self.counts.to(chosen.device), self.real[:, None].expand_as(chosen)
            self.counts[row].scatter_add_(0, chosen.flatten(), real.flatten().float())

    def take(self) -> Tensor:
        """This rank's counts since the last call, [layers * experts]; empty without experts."""
        counts = self.counts.flatten().clone()
        self.counts.zero_()
        return counts

    def metrics(self, counts: Tensor) -> dict[str, Tensor]:
        """The busiest expert's tokens relative to the mean, averaged over layers. counts: `take`, over all ranks."""
        if not counts.numel():
            return {}
        counts = counts.view_as(self.counts)
        busiest = counts.amax(1) * counts.shape[1] / counts.sum(1).clamp(min=1)
        return {"train/expert_load": busiest.mean()}
