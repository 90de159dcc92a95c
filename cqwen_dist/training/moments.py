"""Adam's moments of the heads, spread over the ranks that hold equal copies of a parameter (as ZeRO-1 does).

Those ranks are the replica group for the vocabulary's rows, and the world for what every rank holds whole. With R of
them each owns rows // R rows: it alone keeps their moments and steps them. The last rows % R rows, and every row of a
parameter that is not `spread`, are the rest: all R ranks keep their moments and take the same step.

    rows of the parameter    rank 0's | rank 1's | ... | rest
    moments on rank 1        rank 1's | rest
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.adamw import adamw

from cqwen_dist.parallel.groups import Groups
from cqwen_dist.training.parameter_groups import Member

MOMENTS = ("exp_avg", "exp_avg_sq")
EPS = 1e-8
HOST_BLOCK = 1 << 22  # numbers that are stepped at once on the host, while the parameter is on a device


class Share:
    """The rows of one parameter that this rank steps, with their moments. One rank alone: all of them, the rest."""

    def __init__(self, member: Member, groups: Groups, offload: bool) -> None:
        """offload: the moments, and the step, are on the host."""
        self.member = member
        parameter = member.parameter
        parameter.data = parameter.data.contiguous()  # rows are summed and gathered in place
        self.group: ProcessGroup | None = groups.replica if member.has_rows else groups.world
        self.ranks, self.rank = (1, 0) if self.group is None else (self.group.size(), self.group.rank())
        self.rows = len(parameter) if parameter.ndim else 1
        self.each = self.rows // self.ranks if member.spread and self.ranks > 1 else 0  # rows that a rank owns
        self.place = torch.device("cpu") if offload else parameter.device
        self.offload = offload
        self.lr = 0.0
        self.steps = 0  # Adam's
        self.moments: dict[str, Tensor] = {}  # [kept rows, ...] each, fp32; none before the first step

    @property
    def kept(self) -> list[tuple[int, int]]:
        """[start, stop) of the rows whose moments this rank keeps, in their order: its own, the rest."""
        return [(self.rank * self.each, (self.rank + 1) * self.each), (self.ranks * self.each, self.rows)]

    @property
    def written(self) -> tuple[int, int]:
        """[start, stop) of the rows whose moments this rank saves: its own; the last rank's and the rest are one."""
        (start, stop), (_, end) = self.kept
        return start, end if self.rank == self.ranks - 1 else stop

    @property
    def shape(self) -> torch.Size:
        """Of a moment on this rank."""
        shape = self.member.parameter.shape
        rows = self.each + self.rows - self.ranks * self.each
        return torch.Size((rows, *shape[1:])) if shape else shape

    def own(self, whole: Tensor) -> Tensor:
        """The rows of a parameter or gradient that this rank owns, a view."""
        return torch.atleast_1d(whole)[slice(*self.kept[0])]

    def owned(self, whole: Tensor) -> Tensor:
        """The rows that any rank owns, in the order of the ranks, a view."""
        return torch.atleast_1d(whole)[: self.ranks * self.each]

    def rest(self, whole: Tensor) -> Tensor:
        """The rows that all ranks step, a view."""
        return torch.atleast_1d(whole)[slice(*self.kept[1])]

    def own_moment(self, key: str) -> Tensor:
        return torch.atleast_1d(self.moments[key])[: self.each]

    def rest_moment(self, key: str) -> Tensor:
        return torch.atleast_1d(self.moments[key])[self.each :]

    def load(self, moments: dict[str, Tensor], steps: int) -> None:
        """Begin from these moments, each of this rank's `shape`."""
        self.steps = steps
        self.moments = {key: moments[key].to(self.place, torch.float32).clone() for key in MOMENTS}

    def forget(self) -> None:
        """Begin anew: zero moments, step 0."""
        self.steps, self.moments = 0, {}

    @torch.no_grad()
    def step(self, coefficient: float, betas: tuple[float, float], weight_decay: float) -> None:
        """AdamW on the kept rows, their gradient times the coefficient (at most 1). Others keep the old weights."""
        if not self.moments:
            self.moments = {key: torch.zeros(self.shape, device=self.place) for key in MOMENTS}
        parameter = self.member.parameter
        assert parameter.grad is not None
        for part, moment in ((self.own, self.own_moment), (self.rest, self.rest_moment)):
            weights, gradient = part(parameter.detach()), part(parameter.grad)
            if coefficient < 1.0:
                gradient.mul_(coefficient)
            exp_avg, exp_avg_sq = (moment(key) for key in MOMENTS)
            for at in self._blocks(weights):
                here = _brought(weights[at], self.place)
                adamw(
                    [here],
                    [_brought(gradient[at], self.place)],
                    [exp_avg[at]],
                    [exp_avg_sq[at]],
                    [],
                    [torch.full((), float(self.steps), device=self.place)],
                    fused=True,  # one pass and no temporary of W_cls's size
                    amsgrad=False,
                    beta1=betas[0],
                    beta2=betas[1],
                    lr=self.lr,
                    weight_decay=weight_decay,
                    eps=EPS,
                    maximize=False,
                )
                if here.device != weights.device:
                    weights[at].copy_(here)
        self.steps += 1

    def _blocks(self, weights: Tensor) -> list[slice]:
        """The rows that are stepped at once: all of them, or a part that is copied to the host."""
        rows = len(weights) if weights.numel() else 0
        size = max(1, HOST_BLOCK * rows // weights.numel()) if self.offload and rows else max(1, rows)
        return [slice(start, start + size) for start in range(0, rows, size)]


def _brought(value: Tensor, place: torch.device) -> Tensor:
    """The value itself where it is there already, else a copy in pinned memory (torch keeps and reuses it)."""
    return value if value.device == place else torch.empty(value.shape, pin_memory=True).copy_(value)
