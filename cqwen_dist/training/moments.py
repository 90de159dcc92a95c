"""Adam moments of the heads, sharded over the ranks with equal copies of a parameter (as in ZeRO-1).

For vocabulary rows these ranks are the replica group; for replicated parameters they are the world. Each of R ranks
owns rows // R rows: only the owner keeps their moments and steps them. The last rows % R rows, and all rows of a
parameter that is not `spread`, are the remainder: all R ranks keep their moments and take the same step.

    rows of the parameter    rank 0's | rank 1's | ... | remainder
    moments on rank 1        rank 1's | remainder
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.adamw import adamw

from cqwen_dist.parallel.groups import Groups
from cqwen_dist.training.parameter_groups import Member

MOMENTS = ("exp_avg", "exp_avg_sq")
BETAS, EPS = (0.9, 0.999), 1e-8
HOST_BLOCK = 1 << 22  # values per host step of an offloaded parameter: bounds the pinned memory


class Share:
    """The rows of one parameter that this rank steps, with their moments. With a single rank all are remainder rows."""

    def __init__(self, member: Member, groups: Groups, offload: bool) -> None:
        """offload: keep moments on the host and step there."""
        self.member = member
        parameter = member.parameter
        parameter.data = parameter.data.contiguous()  # rows are summed and gathered in place
        self.group: ProcessGroup | None = groups.replica if member.has_rows else groups.world
        self.ranks, self.rank = (1, 0) if self.group is None else (self.group.size(), self.group.rank())
        self.rows = len(parameter)
        self.each = self.rows // self.ranks if member.spread and self.ranks > 1 else 0  # rows per owner
        self.place = torch.device("cpu") if offload else parameter.device
        self.offload = offload
        self.lr = 0.0
        self.steps = 0  # Adam's
        self.moments: dict[str, Tensor] = {}  # [kept rows, ...] each, fp32; none before the first step

    @property
    def kept(self) -> list[tuple[int, int]]:
        """[start, stop) of the rows with moments on this rank, in storage order: owned rows, remainder."""
        return [(self.rank * self.each, (self.rank + 1) * self.each), (self.ranks * self.each, self.rows)]

    @property
    def written(self) -> tuple[int, int]:
        """[start, stop) of the rows that this rank saves: owned rows; the last rank adds the adjacent remainder."""
        (start, stop), (_, end) = self.kept
        return start, end if self.rank == self.ranks - 1 else stop

    @property
    def shape(self) -> torch.Size:
        """Shape of a moment on this rank."""
        rows = self.each + self.rows - self.ranks * self.each
        return torch.Size((rows, *self.member.parameter.shape[1:]))

    def own(self, whole: Tensor) -> Tensor:
        """View of this rank's rows of a parameter or gradient."""
        return whole[slice(*self.kept[0])]

    def owned(self, whole: Tensor) -> Tensor:
        """View of all owned rows, in rank order."""
        return whole[: self.ranks * self.each]

    def rest(self, whole: Tensor) -> Tensor:
        """View of the remainder rows, which all ranks step."""
        return whole[slice(*self.kept[1])]

    def own_moment(self, key: str) -> Tensor:
        return self.moments[key][: self.each]

    def rest_moment(self, key: str) -> Tensor:
        return self.moments[key][self.each :]

    def load(self, moments: dict[str, Tensor], steps: int) -> None:
        """Restore moments, each of this rank's `shape`."""
        self.steps = steps
        self.moments = {key: moments[key].to(self.place, torch.float32).clone() for key in MOMENTS}

    def forget(self) -> None:
        """Reset to zero moments and step 0."""
        self.steps, self.moments = 0, {}

    @torch.no_grad()
    def step(self, coefficient: float, weight_decay: float) -> None:
        """AdamW on the kept rows, with the gradient times `coefficient` (at most 1). Other rows do not change yet."""
        # Moments are made at the first step: groups that never train take no memory
        if not self.moments:
            self.moments = {key: torch.zeros(self.shape, device=self.place) for key in MOMENTS}
        parameter = self.member.parameter
        assert parameter.grad is not None
        for part, moment in ((self.own, self.own_moment), (self.rest, self.rest_moment)):
            weights, gradient = part(parameter.detach()), part(parameter.grad)
            if coefficient < 1.0:
                gradient.mul_(coefficient)
            exp_avg, exp_avg_sq = (moment(key) for key in MOMENTS)
            # One range of rows, or host-sized blocks with offload
            rows = len(weights) if weights.numel() else 0
            size = max(1, HOST_BLOCK * rows // weights.numel()) if self.offload and rows else max(1, rows)
            for at in (slice(start, start + size) for start in range(0, rows, size)):
                here = _brought(weights[at], self.place)
                adamw(
                    [here],
                    [_brought(gradient[at], self.place)],
                    [exp_avg[at]],
                    [exp_avg_sq[at]],
                    [],
                    [torch.full((), float(self.steps), device=self.place)],  # fresh: fused AdamW increments it in place
                    fused=True,  # one pass and no temporary of W_cls's size
                    amsgrad=False,
                    beta1=BETAS[0],
                    beta2=BETAS[1],
                    lr=self.lr,
                    weight_decay=weight_decay,
                    eps=EPS,
                    maximize=False,
                )
                if here.device != weights.device:
                    weights[at].copy_(here)
        self.steps += 1


def _brought(value: Tensor, place: torch.device) -> Tensor:
    """The value if it is at `place`, otherwise a copy in pinned memory (torch caches and reuses this memory)."""
    return value if value.device == place else torch.empty(value.shape, pin_memory=True).copy_(value)
