"""The heads' optimizer: fp32 parameters outside DeepSpeed, rows spread over the vocabulary group.

Gradient convention, also of `zero.engine`: every rank differentiates its vocabulary group's whole word loss plus its
own numbers' loss, each token weighted by world / global count. The gradient of the global mean is then
    of replicated parameters   sum over the world / world (DeepSpeed averages its own parameters the same way)
    of the vocabulary's rows   sum over the replica group / world

Ranks that hold equal copies share the step (`moments`): gradients are reduce-scattered in place to the ranks that own
the rows, each steps its rows, and the new weights are gathered in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cqwen_dist.parallel.collectives import gather_from_owners, sum_over, sum_to_owners
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.training.moments import MOMENTS, Share
from cqwen_dist.training.parameter_groups import Member
from cqwen_dist.training.stages import StagePlan

NORM_BLOCK = 1 << 20


class HeadOptimizer:
    """AdamW over the heads' parameters; a frozen group costs and changes nothing."""

    def __init__(
        self,
        members: list[Member],
        groups: Groups,
        betas: tuple[float, float],
        weight_decay: float,
        offload: bool = False,
    ) -> None:
        """offload: moments and step on the host."""
        self.members, self.groups = members, groups
        self.betas, self.weight_decay = betas, weight_decay
        self.shares = [Share(member, groups, offload) for member in members]
        # A step of 1e-2 changes the scale by 1 % for b_scale, which passes a softplus (exponential where it is used),
        # but is 700 times the calibrated scale for b_noise. So b_noise's rate is relative to this unit.
        self.noise_unit = 1.0
        self._noise: Tensor | None = None  # the largest entry of b_noise's gradient in the last step, if it trains

    def enter_stage(self, plan: StagePlan, newly_trained: frozenset[str]) -> None:
        """Set which groups train; those in `newly_trained` begin with zero moments and Adam step 0."""
        for share in self.shares:
            share.member.parameter.requires_grad_(share.member.group in plan.stage.groups)
            if share.member.group in newly_trained:
                share.forget()

    def set_lr(self, plan: StagePlan, step: int) -> None:
        for share in self.shares:
            unit = self.noise_unit if share.member.group == "noise" else 1.0
            share.lr = plan.lr(share.member.group, share.member.is_scale, step, unit)

    def reduce_gradients(self) -> Tensor:
        """Sum every gradient over the ranks; returns their squared norm, [] fp32, equal on all. Collective.

        Of a gradient only the rows that this rank steps are summed; the others hold what is left of the transfer.
        """
        trained = [share for share in self.shares if share.member.parameter.requires_grad]
        replicated = [share for share in trained if not share.member.has_rows]
        rows = [share for share in trained if share.member.has_rows]
        for shares in (replicated, rows):
            self._reduce(shares)
        self._noise = next((_gradient(s).abs().amax() for s in trained if s.member.group == "noise"), None)

        # Every number's square is counted by one rank: that of the rest by the first of those that keep it
        device = self.members[0].parameter.device
        first_replica = self.groups.replica_rank == 0
        counted = _counted(replicated, first_replica and self.groups.vocab_rank == 0) + _counted(rows, first_replica)
        found = norm_sq(counted, device)
        return found if self.groups.world is None else sum_over(found, self.groups.world)

    def _reduce(self, shares: list[Share]) -> None:
        """By the module's convention: those that are spread to the owners, each by itself; the rest in one piece."""
        world = self.groups.world_size
        if not shares or world == 1:
            return
        gradients = [_gradient(share) for share in shares]
        group, rests = shares[0].group, [s.rest(g) for s, g in zip(shares, gradients, strict=True)]
        if shares[0].ranks > 1:
            for share, gradient in zip(shares, gradients, strict=True):
                if share.each:
                    sum_to_owners(share.owned(gradient), group)
            flat = torch.cat([rest.flatten() for rest in rests])
            if flat.numel():
                sum_over(flat, group)
                for rest, summed in zip(rests, flat.split([rest.numel() for rest in rests]), strict=True):
                    rest.copy_(summed.view_as(rest))
        for part in (*rests, *(s.own(g) for s, g in zip(shares, gradients, strict=True))):
            part.div_(world)

    def metrics(self) -> dict[str, Tensor]:
        """{"train/b_noise_grad": []} of the last step, over all ranks; {} if b_noise is frozen."""
        return {} if self._noise is None else {"train/b_noise_grad": self._noise}

    def step(self, coefficient: float) -> None:
        """Scale every gradient by the clip coefficient, step, and gather the new weights. Collective."""
        stepped = [share for share in self.shares if share.member.parameter.grad is not None]
        for share in stepped:
            share.step(coefficient, self.betas, self.weight_decay if share.member.decays else 0.0)
            share.member.parameter.grad = None
        for share in stepped:
            if share.each:
                gather_from_owners(share.owned(share.member.parameter.detach()), share.group)

    def drop_gradients(self) -> None:
        for member in self.members:
            member.parameter.grad = None

    def copies(self) -> Iterator[tuple[Member, str, Tensor]]:
        """(parameter, name, tensor) of all that other ranks hold too: weights, and moments of the rest."""
        for share in self.shares:
            yield share.member, share.member.name, share.member.parameter
            for key in share.moments:
                yield share.member, f"{share.member.name}.{key}", share.rest_moment(key)

    @property
    def of_rows(self) -> Share:
        """The share of W_cls; all that has rows is spread alike."""
        return next(share for share in self.shares if share.member.has_rows)

    def moments(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Moments `<name>.exp_avg`, ... and Adam's step by name, of every member that has them. Collective.

        Of the vocabulary's rows: `of_rows.written`. The rest whole, on the first rank alone, a parameter at a time.
        """
        tensors: dict[str, Tensor] = {}
        for share in self.shares:
            for key, moment in share.moments.items():
                name = f"{share.member.name}.{key}"
                if share.member.has_rows:
                    start, stop = share.written
                    tensors[name] = moment[: stop - start]
                elif not share.each:
                    tensors[name] = moment
                elif (whole := _gathered(share, key)) is not None:
                    tensors[name] = whole
        return tensors, {share.member.name: share.steps for share in self.shares if share.moments}

    def load_moments(self, tensors: dict[str, Tensor], steps: dict[str, int]) -> None:
        """Restore what was saved: of the vocabulary's rows those of `of_rows.kept`, the rest whole."""
        for share in self.shares:
            if (name := share.member.name) in steps and share.rows:
                found = {key: tensors[f"{name}.{key}"] for key in MOMENTS}
                if share.each and not share.member.has_rows:
                    found = {key: torch.cat([share.own(whole), share.rest(whole)]) for key, whole in found.items()}
                share.load(found, steps[name])


def _gathered(share: Share, key: str) -> Tensor | None:
    """A moment of all ranks, whole and on the host; None but on the first. Collective over the share's group."""
    whole = torch.empty_like(share.member.parameter)
    share.own(whole).copy_(share.own_moment(key))
    gather_from_owners(share.owned(whole), share.group)
    if share.rank:
        return None
    share.rest(whole).copy_(share.rest_moment(key))
    return whole.detach().cpu()


def _gradient(share: Share) -> Tensor:
    """The parameter's gradient; zeros where the loss does not depend on it."""
    parameter = share.member.parameter
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _counted(shares: list[Share], with_rest: bool) -> list[Tensor]:
    """The parts of the gradients whose squares this rank counts."""
    gradients = [(share, _gradient(share)) for share in shares]
    parts = [part for s, g in gradients for part in (s.own(g), *([s.rest(g)] if with_rest else []))]
    return [part for part in parts if part.numel()]


def norm_sq(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The squared norm of them all, [] fp32, on their device.

    In blocks on a CPU: torch's own norm of 1e8 fp32 numbers is 1.5 % off, and squaring all at once makes a copy.
    """
    if gradients and gradients[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(gradients), dtype=torch.float32)).square().sum()
    total = torch.zeros((), device=device)
    for gradient in gradients:
        for block in gradient.flatten().split(NORM_BLOCK):
            total += block.float().square().sum()
    return total
