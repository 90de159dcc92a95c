"""The heads' optimizer: fp32 parameters outside DeepSpeed, rows spread over the vocabulary group.

Gradient convention, also of `zero.engine`: every rank differentiates its vocabulary group's whole word loss plus its
own numbers' loss, each token weighted by world / global count. The gradient of the global mean is then
    of replicated parameters   sum over the world / world (DeepSpeed averages its own parameters the same way)
    of the vocabulary's rows   sum over the replica group / world
"""

from __future__ import annotations

import torch
from torch import Tensor

from cqwen_dist.parallel.collectives import sum_over
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.training.parameter_groups import Member
from cqwen_dist.training.stages import StagePlan

MOMENTS = ("exp_avg", "exp_avg_sq")
NORM_BLOCK = 1 << 20


class HeadOptimizer:
    """AdamW over the heads' parameters; a frozen group costs and changes nothing."""

    def __init__(self, members: list[Member], groups: Groups, betas: tuple[float, float], weight_decay: float) -> None:
        self.members = members
        self.groups = groups
        # A step of 1e-2 changes the scale by 1 % for b_scale, which passes a softplus (exponential where it is used),
        # but is 700 times the calibrated scale for b_noise. So b_noise's rate is relative to this unit.
        self.noise_unit = 1.0
        self._noise: Tensor | None = None  # the largest entry of b_noise's gradient in the last step, if it trains
        self.adamw = torch.optim.AdamW(
            [{"params": [m.parameter], "lr": 0.0, "weight_decay": weight_decay if m.decays else 0.0} for m in members],
            betas=betas,
            fused=True,  # one pass and no temporary of W_cls's size
        )

    def enter_stage(self, plan: StagePlan, newly_trained: frozenset[str]) -> None:
        """Set which groups train; those in `newly_trained` begin with zero moments and Adam step 0."""
        for member in self.members:
            member.parameter.requires_grad_(member.group in plan.stage.groups)
            member.parameter.grad = None
            if member.group in newly_trained:
                self.adamw.state.pop(member.parameter, None)

    def set_lr(self, plan: StagePlan, step: int) -> None:
        for member, group in zip(self.members, self.adamw.param_groups, strict=True):
            unit = self.noise_unit if member.group == "noise" else 1.0
            group["lr"] = plan.lr(member.group, member.is_scale, step, unit)

    def reduce_gradients(self) -> Tensor:
        """Reduce every gradient over the ranks; returns their squared norm, [] fp32, equal on all. Collective."""
        trained = [m for m in self.members if m.parameter.requires_grad]
        replicated = [_gradient(m.parameter) for m in trained if not m.has_rows]
        rows = [_gradient(m.parameter) for m in trained if m.has_rows]

        # The module's convention: one all-reduce for what is replicated, one for each parameter with rows
        world = self.groups.world_size
        if world > 1:
            if replicated:
                flat = sum_over(torch.cat([g.flatten() for g in replicated]), self.groups.world).div_(world)
                for gradient, part in zip(replicated, flat.split([g.numel() for g in replicated]), strict=True):
                    gradient.copy_(part.view_as(gradient))
            for gradient in rows:
                sum_over(gradient, self.groups.replica).div_(world)

        self._noise = next((_gradient(m.parameter).abs().amax() for m in trained if m.group == "noise"), None)
        device = self.members[0].parameter.device
        norm_sq = torch.stack([_norm_sq(replicated, device), _norm_sq(rows, device)])
        return norm_sq[0] + sum_over(norm_sq[1:], self.groups.vocab)[0]

    def metrics(self) -> dict[str, Tensor]:
        """{"train/b_noise_grad": []} of the last step, over all ranks; {} if b_noise is frozen."""
        return {} if self._noise is None else {"train/b_noise_grad": self._noise}

    def step(self, coefficient: float) -> None:
        """Scale every gradient by the clip coefficient and step."""
        for member in self.members:
            if member.parameter.grad is not None and coefficient < 1.0:
                member.parameter.grad.mul_(coefficient)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)

    def moments(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Moments `<name>.exp_avg`, ... and Adam's step by name, of every member that has them."""
        tensors, steps = {}, {}
        for member in self.members:
            state = self.adamw.state.get(member.parameter)
            if state:
                steps[member.name] = int(state["step"])
                tensors.update({f"{member.name}.{key}": state[key] for key in MOMENTS})
        return tensors, steps

    def load_moments(self, tensors: dict[str, Tensor], steps: dict[str, int]) -> None:
        """Restore what `moments` returned (this rank's rows)."""
        for member in self.members:
            if member.name in steps:
                step = torch.tensor(float(steps[member.name]), device=member.parameter.device)
                moments = {key: tensors[f"{member.name}.{key}"].to(member.parameter).clone() for key in MOMENTS}
                self.adamw.state[member.parameter] = {"step": step, **moments}


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    """Its gradient; zeros where the loss does not depend on it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _norm_sq(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The squared norm of them all, [] fp32.

    In blocks on a CPU: torch's own norm of 1e8 fp32 numbers is 1.5 % off, and squaring all at once makes a copy.
    """
    total = torch.zeros((), device=device)
    for gradient in gradients:
        if gradient.is_cuda:
            total += torch.linalg.vector_norm(gradient).square()
        else:
            for block in gradient.flatten().split(NORM_BLOCK):
                total += block.square().sum()
    return total
