"""The optimizer of the heads: fp32 parameters outside DeepSpeed, vocabulary rows sharded over the vocabulary group.

Gradient convention, also in `zero.engine`: each rank differentiates the word loss of its vocabulary group plus the
number loss of its tokens, each token weighted by world / global count. The gradient of the global mean is then
    replicated parameters   sum over the world / world (DeepSpeed averages the features' gradients the same way)
    vocabulary rows         sum over the replica group / world

Ranks with equal copies of a parameter share its Adam moments and its step (as in ZeRO-1): an in-place reduce-scatter
sends gradients to the ranks that own the rows, each rank steps its rows, and an in-place all-gather returns the new
weights. For vocabulary rows these ranks are the replica group; for replicated parameters they are the world. Each of R
ranks owns rows // R rows: only the owner keeps their moments and steps them. The last rows % R rows, and all rows of a
parameter that is not `spread`, are the remainder: all R ranks keep their moments and take the same step.

    rows of the parameter    rank 0's | rank 1's | ... | remainder
    moments on rank 1        rank 1's | remainder
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cqwen_dist.parallel.collectives import gather_from_owners, sum_over, sum_to_owners
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.training.parameter_groups import Member
from cqwen_dist.training.stages import StagePlan

MOMENTS = ("exp_avg", "exp_avg_sq")
BETAS, EPS = (0.9, 0.999), 1e-8
CANDIDATE_UNIT = 0.25  # of candidates' rates, if mean |loc_U| is 1 (docs/training.md, Rates)
HOST_BLOCK = 1 << 22  # values per host step of an offloaded parameter: bounds the pinned memory
NORM_BLOCK = 1 << 20


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

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Views of the rows of a parameter or gradient that this rank steps: owned rows, remainder."""
        return [self.own(whole), self.rest(whole)]

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
    def step(self, count: Tensor, weight_decay: float) -> None:
        """AdamW on the kept rows; other rows do not change yet. count: number of this step, [] fp32, at `place`."""
        # Moments are made at the first step: groups that never train take no memory
        if not self.moments:
            self.moments = {key: torch.zeros(self.shape, device=self.place) for key in MOMENTS}
        kinds = [self.parts(self.member.parameter.detach()), self.parts(_gradient(self))]
        kinds += [[self.own_moment(key), self.rest_moment(key)] for key in MOMENTS]
        pieces = [piece for piece in zip(*kinds, strict=True) if piece[0].numel()]
        # All at once; with offload one block after the other
        works = [[block] for piece in pieces for block in _blocks(piece)] if self.offload else [pieces]
        for work in filter(None, works):
            weights, gradients, exp_avg, exp_avg_sq = map(list, zip(*work, strict=True))
            here = [_brought(value, self.place) for value in weights]
            torch._fused_adamw_(  # one pass and no temporary of W_cls's size
                here,
                [_brought(value, self.place) for value in gradients],
                exp_avg,
                exp_avg_sq,
                [],
                [count] * len(here),
                amsgrad=False,
                beta1=BETAS[0],
                beta2=BETAS[1],
                lr=self.lr,
                weight_decay=weight_decay,
                eps=EPS,
                maximize=False,
            )
            for value, stepped in zip(weights, here, strict=True):
                if stepped is not value:
                    value.copy_(stepped)
        self.steps += 1


def _blocks(piece: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Tensors [rows, ...] of one shape, in blocks of at most `HOST_BLOCK` values."""
    size = max(1, HOST_BLOCK * len(piece[0]) // piece[0].numel())
    return zip(*(each.split(size) for each in piece), strict=True)


def _brought(value: Tensor, place: torch.device) -> Tensor:
    """The value if it is at `place`, otherwise a copy in pinned memory (torch caches and reuses this memory)."""
    return value if value.device == place else torch.empty(value.shape, pin_memory=True).copy_(value)


class HeadOptimizer:
    """AdamW over the parameters of the heads. A frozen group is skipped."""

    def __init__(self, members: list[Member], groups: Groups, weight_decay: float, offload: bool = False) -> None:
        """offload: keep moments on the host and step there."""
        self.members, self.groups = members, groups
        self.weight_decay = weight_decay
        self.shares = [Share(member, groups, offload) for member in members]
        # A step of 1e-2 in b_scale changes the scale by 1 %, since a softplus follows (exponential in this range). In
        # b_noise the same step would be 700 times the calibrated scale. So its rate is relative to this unit.
        self.noise_unit = 1.0
        self.candidate_unit = CANDIDATE_UNIT

    def enter_stage(self, plan: StagePlan, newly_trained: frozenset[str]) -> None:
        """Set the trained groups. Groups in `newly_trained` start with zero moments and Adam step 0."""
        for share in self.shares:
            share.member.parameter.requires_grad_(share.member.group in plan.stage.groups)
            if share.member.group in newly_trained:
                share.forget()

    def set_lr(self, plan: StagePlan, step: int) -> None:
        for share in self.shares:
            unit = self.noise_unit if share.member.group == "noise" else 1.0
            share.lr = plan.lr(share.member.group, share.member.is_scale, step, unit)
            if share.member.is_of_candidates:
                share.lr *= self.candidate_unit

    def reduce_gradients(self) -> Tensor:
        """Sum gradients over the ranks. Returns their squared norm, [] fp32, equal on all ranks. Collective.

        Only the gradient rows that this rank steps are valid afterwards; other rows contain leftovers of the transfer.
        """
        # Every rank visits the shares in the same order, since each share is a collective. A parameter without a
        # gradient on this rank takes part with zeros.
        trained = [share for share in self.shares if share.member.parameter.requires_grad]
        replicated = [share for share in trained if not share.member.has_rows]
        rows = [share for share in trained if share.member.has_rows]
        for shares in (replicated, rows):
            self._reduce(shares)

        # One rank counts each square. All ranks keep the remainder rows, so only the first rank counts these.
        device = self.members[0].parameter.device
        first_replica = self.groups.replica_rank == 0
        counted = _counted(replicated, first_replica and self.groups.vocab_rank == 0) + _counted(rows, first_replica)
        found = norm_sq(counted, device)
        return found if self.groups.world is None else sum_over(found, self.groups.world)

    def _reduce(self, shares: list[Share]) -> None:
        """Sum by the module's convention: owned rows per parameter, all remainder rows in one flat all-reduce."""
        world = self.groups.world_size
        if not shares or world == 1:
            return
        gradients = [_gradient(share) for share in shares]
        group, rests = shares[0].group, [s.rest(g) for s, g in zip(shares, gradients, strict=True)]
        if shares[0].ranks > 1:
            for share, gradient in zip(shares, gradients, strict=True):
                if share.each:
                    sum_to_owners(share.owned(gradient), group)
            # Biases and other small parameters: one collective instead of one per tensor
            flat = torch.cat([rest.flatten() for rest in rests])
            if flat.numel():
                sum_over(flat, group)
                for rest, summed in zip(rests, flat.split([rest.numel() for rest in rests]), strict=True):
                    rest.copy_(summed.view_as(rest))
        for part in (*rests, *(s.own(g) for s, g in zip(shares, gradients, strict=True))):
            part.div_(world)

    def step(self, coefficient: float) -> None:
        """Scale gradients by the clip coefficient, step, and gather the new weights. Collective."""
        stepped = [share for share in self.shares if share.member.parameter.grad is not None]
        if coefficient < 1.0:
            torch._foreach_mul_([part for share in stepped for part in share.parts(_gradient(share))], coefficient)
        counts: dict[tuple[int, torch.device], Tensor] = {}  # mostly one
        for share in stepped:
            now = share.steps, share.place
            if now not in counts:
                counts[now] = torch.full((), share.steps + 1.0, device=share.place)
            share.step(counts[now], self.weight_decay if share.member.decays else 0.0)
            share.member.parameter.grad = None
        for share in stepped:
            if share.each:
                gather_from_owners(share.owned(share.member.parameter.detach()), share.group)

    def copies(self) -> Iterator[tuple[Member, str, Tensor]]:
        """(parameter, name, tensor) of all replicated tensors: weights, and moments of remainder rows."""
        for share in self.shares:
            yield share.member, share.member.name, share.member.parameter
            for key in share.moments:
                yield share.member, f"{share.member.name}.{key}", share.rest_moment(key)

    @property
    def of_rows(self) -> Share:
        """The share of W_cls. All parameters with vocabulary rows are sharded like it."""
        return next(share for share in self.shares if share.member.has_rows)

    def moments(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Moments `<name>.exp_avg`, ... and Adam steps by name, for each member that has moments. Collective.

        For vocabulary rows: this rank's `of_rows.written`. Other moments are gathered on the first rank only, one
        parameter at a time, to bound the memory.
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
                else:
                    whole = torch.empty_like(share.member.parameter)
                    share.own(whole).copy_(share.own_moment(key))
                    gather_from_owners(share.owned(whole), share.group)
                    if not share.rank:
                        share.rest(whole).copy_(share.rest_moment(key))
                        tensors[name] = whole.detach().cpu()
        return tensors, {share.member.name: share.steps for share in self.shares if share.moments}

    def load_moments(self, tensors: dict[str, Tensor], steps: dict[str, int]) -> None:
        """Restore saved moments: for vocabulary rows the `of_rows.kept` rows, for other parameters all rows."""
        for share in self.shares:
            if (name := share.member.name) in steps and share.rows:
                found = {key: tensors[f"{name}.{key}"] for key in MOMENTS}
                if share.each and not share.member.has_rows:
                    found = {key: torch.cat([share.own(whole), share.rest(whole)]) for key, whole in found.items()}
                share.load(found, steps[name])


def _gradient(share: Share) -> Tensor:
    """The parameter's gradient; zeros if the loss does not depend on it."""
    parameter = share.member.parameter
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _counted(shares: list[Share], with_rest: bool) -> list[Tensor]:
    gradients = [(share, _gradient(share)) for share in shares]
    parts = [part for s, g in gradients for part in (s.own(g), *([s.rest(g)] if with_rest else []))]
    return [part for part in parts if part.numel()]


def norm_sq(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The squared norm of all gradients together, [] fp32, on their device.

    On a CPU this runs in blocks: torch's norm of 1e8 fp32 values is 1.5 % off, and squaring a full tensor copies it.
    """
    if gradients and gradients[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(gradients), dtype=torch.float32)).square().sum()
    total = torch.zeros((), device=device)
    for gradient in gradients:
        for block in gradient.flatten().split(NORM_BLOCK):
            total += block.float().square().sum()
    return total
