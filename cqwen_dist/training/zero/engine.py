"""One optimizer step of the full model: features under DeepSpeed ZeRO, heads under `HeadOptimizer`.

    DeepSpeed engine      frozen backbone, LoRA, w_num, <NUM> row      ZeRO 1-3, fp32 or bf16
    HeadOptimizer         abduction, action                            fp32, rows over the vocabulary group

All stages share one engine: parameters of frozen groups have no gradient and lr 0. While no feature group trains, z is
computed without a graph and DeepSpeed takes no step.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from cqwen_dist.batch import Batch
from cqwen_dist.config.errors import UserError
from cqwen_dist.model.modules import CausalModules
from cqwen_dist.parallel.collectives import Cause, KnownFailure, gather_objects, naming
from cqwen_dist.parallel.groups import Groups, limit_wait
from cqwen_dist.training.optim import BETAS, HeadOptimizer
from cqwen_dist.training.parameter_groups import feature_members, head_members
from cqwen_dist.training.stages import StagePlan
from cqwen_dist.training.zero import patches, zero_state


@dataclass(frozen=True)
class EngineSettings:
    """The config values that `training.zero.engine` uses."""

    trained: frozenset[str]  # the groups that any stage trains
    weight_decay: float
    max_grad_norm: float | None
    bf16: bool
    zero_stage: int
    offload: bool  # whether optimizer states are on the host
    outside: tuple[str, str] | None  # `BaseArchitecture.outside`
    deepspeed: Callable[[int], dict[str, Any]]  # number of parameters that the engine trains -> DeepSpeed's config


class NonFiniteStep(KnownFailure):
    """The gradient norm is not finite. All ranks refused the step, and no parameter changed.

    ranks: the ranks with features that are not finite.
    """

    cause = Cause("a loss that is not finite", passing=False)

    def __init__(self, text: str, ranks: list[int] | None = None) -> None:
        super().__init__(text)
        self.ranks = ranks or []


class UsualNorm:
    """The clipping norm: a number, or three times the median norm of the last steps of this stage.

    The loss is a sum over V words, divided by scales of 1e-3, so its gradient norm is about 1,000 on a real base. AdamW
    does not depend on this size, so a fixed limit of 1 would clip each step. Only outliers should be clipped. The first
    `KNOWN` steps are never clipped.
    """

    TIMES, LAST, KNOWN = 3.0, 64, 5

    def __init__(self, limit: float | None) -> None:
        """limit: a fixed norm; None for three times the median."""
        self.fixed = limit
        self.seen: list[float] = []  # norms of the last steps of this stage; saved in checkpoints

    def limit(self) -> float:
        """The limit for the next step."""
        if self.fixed is not None:
            return self.fixed
        usual = statistics.median(self.seen) if len(self.seen) >= self.KNOWN else 0.0
        return self.TIMES * usual or math.inf  # all gradients were zero: no limit

    def add(self, norm: float) -> None:
        self.seen = [*self.seen, norm][-self.LAST :]


def clip_coefficient(over_limit: float) -> float:
    """The factor of all gradients, by DeepSpeed's formula. over_limit: gradient norm divided by its limit."""
    return min(1.0, 1.0 / (over_limit + 1e-6))


class Engine:
    """Forward, backward and step of the full model under one gradient norm."""

    def __init__(
        self,
        model: CausalModules,
        settings: EngineSettings,
        device: torch.device,
        groups: Groups,
        timeout_s: float | None = None,
    ) -> None:
        """timeout_s: of DeepSpeed's collectives; None: torch's default."""
        self.settings, self.device, self.groups = settings, device, groups
        self.model = model.to(device).requires_grad_(False)
        heads = nn.ModuleDict(model.heads)
        members = head_members(heads)
        self.heads = HeadOptimizer(members, groups, settings.weight_decay, settings.offload)
        self.feature_members = feature_members(model.features, settings.trained)
        self.slots = {m.slot: m for m in sorted(self.feature_members, key=lambda m: m.slot)}  # one member per slot
        self.names = {m.parameter: m.name for m in self.feature_members}
        trained = sum(m.parameter.numel() for m in self.feature_members)
        self.deepspeed_config = settings.deepspeed(trained)
        self.engine = self._start_deepspeed(timeout_s)
        self.features_train = False
        self._trained = False  # whether a forward pass had gradients
        self.feature_changes = 0  # number of changes of z: steps that train features, loaded states
        self._head_norm_sq = torch.zeros((), device=device)
        self._norm = math.nan  # the joint norm of this step; NaN until DeepSpeed asks for it
        self.usual = UsualNorm(settings.max_grad_norm)
        self.clipped = False
        self._size = torch.zeros((), device=device)  # of this rank's features in this step: finite if they are

    def _start_deepspeed(self, timeout_s: float | None) -> Any:
        parameter_groups = []
        for slot, member in self.slots.items():
            parameters = [m.parameter for m in self.feature_members if m.slot == slot]
            for p in parameters:
                p.requires_grad_(True)  # at its start DeepSpeed hooks the parameters that need a gradient, never later
                if self.settings.bf16:
                    p.data = p.data.bfloat16()  # DeepSpeed casts a normal model itself, but not a partitioned one
            decay = self.settings.weight_decay if member.decays else 0.0
            parameter_groups.append({"params": parameters, "lr": 0.0, "weight_decay": decay})
        patches.join_deepspeed()
        # ZeRO-3 gathers weights only for the module that has them
        if self.settings.zero_stage == 3 and (outside := self.settings.outside) is not None:
            for name, module in self.model.features.named_modules():
                if name.endswith(f".{outside[0]}"):
                    deepspeed.zero.register_external_parameter(module, module.get_parameter(outside[1]))
        optimizer = torch.optim.AdamW(parameter_groups, betas=BETAS, fused=True)
        patches.skip_frozen_groups(optimizer)
        with naming("DeepSpeed's start"):
            engine, *_ = deepspeed.initialize(
                model=self.model.features, optimizer=optimizer, config=self.deepspeed_config, dist_init_required=False
            )
        if timeout_s is not None:
            limit_wait(engine.optimizer.dp_process_group, timeout_s)
        if not hasattr(engine.optimizer, "get_grad_norm_direct"):
            raise UserError(
                "parallel.zero_stage",
                self.settings.zero_stage,
                f"another stage: DeepSpeed's {type(engine.optimizer).__name__} has no place to join the heads' norm",
            )
        self.flat = None
        if patches.is_flat(engine.optimizer):
            self.flat = patches.FlatStep(engine.optimizer, lambda norm_sq: clip_coefficient(self._over_limit(norm_sq)))
        else:
            patches.patch_norm(engine.optimizer, self._over_limit)
        return engine

    def _over_limit(self, feature_norm_sq: Tensor) -> float:
        """The joint norm of features and heads, divided by its limit. Raises as `_finite_norm`."""
        self._norm = self._finite_norm(feature_norm_sq.to(self.device) + self._head_norm_sq)
        return self._norm / self.usual.limit()

    def enter_stage(self, plan: StagePlan, newly_trained: frozenset[str]) -> None:
        """Set the trained groups. Groups in `newly_trained` start with zero moments, and the usual norm is cleared."""
        if newly_trained:
            self.usual.seen = []
        trained = plan.stage.groups
        self.heads.enter_stage(plan, newly_trained)
        # DeepSpeed's engine stays as it is: a frozen group only gets no gradient and lr 0
        for m in self.feature_members:
            m.parameter.requires_grad_(m.group in trained)
        self.features_train = any(m.group in trained for m in self.feature_members)
        fresh = {i for i, m in enumerate(self.slots.values()) if m.group in newly_trained}
        zero_state.reset_moments(self.engine, fresh)

    def set_lr(self, plan: StagePlan, step: int) -> None:
        self.heads.set_lr(plan, step)
        for member, group in zip(self.slots.values(), self.engine.optimizer.param_groups, strict=True):
            group["lr"] = plan.lr(member.group, False, step)
            group["frozen"] = member.group not in plan.stage.groups

    def forward(self, batch: Batch, keep: Tensor) -> Tensor:
        """z [N,H] at the label positions `keep` [N]. Has a graph if a feature group trains and gradients are on."""
        graph = self.features_train and torch.is_grad_enabled()
        if any(module.training != graph for module in self.engine.module.modules()):  # to set them takes 0.1 s
            self.engine.train(graph)
        with torch.set_grad_enabled(graph):
            run = self.engine if graph else self.engine.module
            if graph and not self._trained:  # the first pass with gradients; ZeRO-3 may have recorded one without
                patches.forget_trace(self.engine)
                self._trained = True
            with naming("DeepSpeed's forward"):
                z = self.model.kept_features(batch, keep, run)
        # Only a flag on the device: which rank has bad features is asked once the norm turns out bad
        self._size += torch.linalg.vector_norm(z.detach(), 1, dtype=torch.float32)
        return z

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradients of one micro-batch; `last` marks the last of the optimizer step."""
        # Times 1, or NaN if the loss is infinite. Its gradient may still be finite, but the step must be refused.
        loss = loss * (1.0 + 0.0 * loss.detach())
        if self.features_train:
            self.engine.set_gradient_accumulation_boundary(last)
            with naming("DeepSpeed's backward"):  # no division by micro-batches: the loss has global denominators
                self.engine.backward(loss, scale_wrt_gas=False)
            if self.flat is not None and not last:
                self.flat.add_up()
        else:
            loss.backward()

    def step(self) -> float:
        """Clip by the joint norm, step, and return the norm. Sets `clipped`.

        Raises `NonFiniteStep` on all ranks before any parameter changes if the norm is not finite. Raises
        `CollectiveError` if a rank is lost. (If that happens inside DeepSpeed's step or the all-gather of the heads,
        the other ranks are half updated, and they end without a checkpoint of this step.)
        """
        # The order matters. The heads' norm comes first: DeepSpeed asks for the joint norm inside its step
        # (`_over_limit`). The heads step last: they only step once the joint norm is known to be finite.
        self._norm = math.nan
        self._head_norm_sq = self.heads.reduce_gradients()
        try:
            if self.features_train:
                self.feature_changes += 1
                with naming("DeepSpeed's step"):
                    self.engine.step()
                if math.isnan(self._norm) or not self.engine.was_step_applied():
                    self._finite_norm(torch.tensor(torch.nan))
            else:
                self._norm = self._finite_norm(self._head_norm_sq)
        except NonFiniteStep:  # without this, the next step would add to these gradients
            for member in self.heads.members:
                member.parameter.grad = None
            if self.features_train:
                zero_state.discard_gradients(self.engine)
            raise
        finally:
            self._size.zero_()
        # The usual norm takes this step in afterwards, so a step is never measured against itself
        limit = self.usual.limit()
        self.heads.step(clip_coefficient(self._norm / limit))
        self.usual.add(self._norm)
        self.clipped = self._norm > limit
        return self._norm

    def _finite_norm(self, norm_sq: Tensor) -> float:
        """The square root as a float, equal on all ranks. Raises `NonFiniteStep` on all ranks if it is not finite.

        The host waits for the device here. Without this wait a NaN would reach the parameters unnoticed.
        """
        norm = float(norm_sq.sqrt())
        if not math.isfinite(norm):
            found = [rank for rank, finite in enumerate(gather_objects(bool(self._size.isfinite()))) if not finite]
            features = f"the features of rank {', '.join(map(str, found))} are not" if found else "all features are"
            raise NonFiniteStep(
                f"the gradient norm, all-reduced over the world group, is {norm}; {features} finite; no step taken",
                found,
            )
        return norm

    def feature_state(self) -> zero_state.FeatureState:
        """Full parameters, moments and Adam steps of the features. Collective over the world."""
        return zero_state.read_state(self.engine, self.names, list(self.slots))

    def feature_shapes(self) -> dict[str, torch.Size]:
        """Shapes of the parameters that `feature_state` returns, by name."""
        return {m.name: zero_state.whole_shape(m.parameter) for m in self.feature_members}

    def load_feature_state(self, state: zero_state.FeatureState) -> None:
        """Restore a `feature_state`."""
        self.feature_changes += 1
        zero_state.write_state(self.engine, self.names, list(self.slots), state)
