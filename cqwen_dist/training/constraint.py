"""KL(U || U at the start) against forgetting (seed S3 2.3): monitored, or constrained.

    U at the start = abduction of the base features by the start's weights, in all stages (adapters off, the start's
                     other trained features); a run that starts with trained adapters has KL > 0 from the first step
    KL of a token  = mean over C dimensions of the closed form for two Cauchy laws (`ops.cauchy.Cauchy.kl`)

Cost: until a feature group trains, z equals the start's z, and the start's U costs two GEMMs [N,H]x[H,C]; the loss
costs six [N,C]x[C,V]. Later, the start's features need a second forward pass of the backbone without gradient. `dual`
then measures only every 10th step, as `monitor` does, while KL is below an eighth of eps; the loss stays as it is.

`dual` adds weight * KL with weight = multiplier * (KL / eps)^4, and 0 below an eighth of eps. The power reacts at the
next step. An integral controller would react too late, as KL starts at 0 and rises within a few steps. The power uses
the KL of the previous step, so the term is linear in the tokens and decomposes over ranks and micro-batches. After each
step the log of the multiplier moves by a tenth of the relative distance of the global mean KL from its target, faster
up than down. Both factors are tensors, so no step waits for them, except if a second pass depends on them.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.config.trainable import is_added, is_lora, is_lora_b
from cqwen_dist.config.training import ConstraintConfig
from cqwen_dist.model.backbone import adapters_disabled
from cqwen_dist.model.modules import CausalModules
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.parallel.collectives import sum_over

BETA = 10.0  # initial multiplier of `dual`
EVERY = 10  # steps between measurements of `monitor`; once features have trained, each needs a second forward pass
AIM = 0.8  # of eps: the multiplier's target; below 1, since batch means scatter
_STEEPNESS = 4  # the exponent in (KL/eps)^4,
_ANSWER = (0.125**_STEEPNESS, 16.0)  # which is 0 below this range and clamped above
_FALL = 0.2  # largest fall of the multiplier per step: KL is 0 at the start and will rise
_RATE = 0.1  # step size of the multiplier's logarithm
_LEAST = 1e-2  # lower bound of the multiplier, as a fraction of BETA


class Constraint:
    """The U of the start, and the distance of the current U from it. Equal on all ranks."""

    def __init__(
        self,
        model: CausalModules,
        config: ConstraintConfig,
        features: Callable[[Batch, Tensor], Tensor],
        shapes: Mapping[str, torch.Size],
        bounded: bool = True,
    ) -> None:
        """features: forward pass of the engine, (batch on the device, keep [N]) -> z [N,H]. shapes: of the features'
        trained parameters, by name. bounded: as `Config.kl_bounded`."""
        self.model, self.config, self._features, self._bounded = model, config, features, bounded
        self.mode = config.mode or "monitor"
        self.device = model.action.cls_weight.device
        self.features_moved = False  # whether a group of the features has ever trained
        self.adapted = False  # whether the run began with trained adapters
        self._abduction = _frozen_copy(model)
        # The features' trained parameters at the start, without adapters, which are switched off. Ours are computed in
        # fp32, the base's in its dtype.
        dtypes = {name: parameter.dtype for name, parameter in model.features.named_parameters()}
        self._features_then = {
            name: torch.ones(shape, device=self.device, dtype=torch.float32 if is_added(name) else dtypes[name])
            for name, shape in shapes.items()
            if not is_lora(name)
        }
        self._spread = torch.ones(model.config.causal_hidden_size, device=self.device)
        self.multiplier = torch.tensor(BETA, device=self.device)
        self._answer = torch.tensor(0.0, device=self.device)
        self._near: bool | None = None  # whether KL was an eighth of eps at the last measurement; None: not read yet

    @torch.no_grad()
    def begin(self, features: dict[str, Tensor], z: Iterable[Tensor]) -> None:
        """Use the current model as the start. Collective over the world.

        features: full parameters of the engine by name. z: of this rank's share of sample texts, to measure the
        spread of U's location: the standard deviation over tokens with the mean scale added in quadrature. The scale
        keeps the spread above 0 in dimensions without variation (number dimensions).
        """
        self._abduction = _frozen_copy(self.model)
        for name, value in self._features_then.items():
            value.copy_(features[name])
        self.adapted = any(bool(value.any()) for name, value in features.items() if is_lora_b(name))
        size = self.model.config.causal_hidden_size
        laws = [torch.zeros(2, 0, size, device=self.device)]
        for part in z:
            u = self._abduction(part)
            laws.append(torch.stack([u.loc, u.scale]))
        loc, scale = torch.cat(laws, 1).double()
        count = torch.full((size,), len(loc), dtype=torch.float64, device=self.device)
        *sums, tokens = sum_over(torch.stack([loc.sum(0), scale.sum(0), count]))
        mean, mean_scale = torch.stack(sums) / tokens.clamp(min=1)
        variance = sum_over((loc - mean).square().sum(0)) / tokens.clamp(min=1)
        self._spread.copy_((variance + mean_scale.square()).sqrt())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the start by their names in its file."""
        abduction = {f"abduction.{name}": value for name, value in self._abduction.state_dict().items()}
        features = {f"features.{name}": value for name, value in self._features_then.items()}
        return {**abduction, **features, "spread": self._spread}

    def load(self, tensors: dict[str, Tensor], adapted: bool, state: dict[str, Any]) -> None:
        """Restore `tensors`, `adapted` and a `state_dict`."""
        self._abduction = _frozen_copy(self.model)  # also copies the scale floor, which is not a tensor
        for name, value in self.tensors().items():
            value.copy_(tensors[name])
        self.adapted = adapted
        self.multiplier.fill_(state["multiplier"])
        self._answer.fill_(state["answer"])
        self._near = None

    def state_dict(self) -> dict[str, float]:
        """The state that changes in training, for a checkpoint."""
        return {"multiplier": float(self.multiplier), "answer": float(self._answer)}

    def due(self, step: int) -> bool:
        """Whether KL is measured at this step. Equal on all ranks."""
        if self.mode == "off" or step % EVERY == 0:
            return self.mode != "off"
        if self.mode == "monitor":
            return False
        if not self.second_pass or step < EVERY:
            return True
        if self._near is None:
            self._near = bool(self._answer > 0)
        return self._near

    @property
    def second_pass(self) -> bool:
        """Whether the start's z may differ from z, and needs a second forward pass."""
        return self.features_moved or self.adapted

    @torch.no_grad()
    def start_features(self, batch: Batch, keep: Tensor) -> Tensor:
        """z [N,H] with the parameters of the start. Collective if the engine's forward pass is."""
        with adapters_disabled(self.model.transformer), self.model.features.using(self._features_then):
            return self._features(batch, keep)

    def term(self, u: Cauchy, z_start: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """The weighted loss of one micro-batch, and its sums [4]: KL, drift, tokens over eps, unweighted loss.

        u: current U [N,C]. z_start [N,H]. weight: number of ranks divided by the global number of tokens.
        """
        held = self.mode == "dual"
        with torch.no_grad():
            before = self._abduction(z_start)
        with torch.set_grad_enabled(held):
            kl = u.kl(before, self._spread).mean(-1)
            penalty = self.multiplier * self._answer * kl.sum() if held else torch.zeros((), device=self.device)
        with torch.no_grad():
            drift = ((u.loc - before.loc).abs() / self._spread).mean(-1).sum()
            sums = torch.stack([kl.sum(), drift, (kl > self.config.eps).sum().float(), penalty.detach()])
        return weight * penalty, sums.detach()

    @torch.no_grad()
    def after_step(self, sums: Tensor, tokens: int) -> dict[str, Tensor]:
        """Metrics of the step from sums [4] over all ranks. `dual` updates the multiplier. No host synchronisation."""
        kl, drift, over, loss = sums / max(tokens, 1)
        metrics: dict[str, Any] = {"train/kl": kl, "train/kl_drift": drift, "train/kl_over_eps": over}
        if self._bounded:
            metrics["train/kl_eps"] = self.config.eps
        if self.mode == "dual":
            metrics["train/constraint_loss"] = loss
            metrics["train/kl_multiplier"] = (self.multiplier * self._answer).clone()
            off = (kl / (AIM * self.config.eps) - 1.0).clamp(-_FALL, 1.0)
            self.multiplier.mul_(torch.exp(_RATE * off)).clamp_(min=_LEAST * BETA)
            answer = (kl / self.config.eps).pow(_STEEPNESS).clamp(max=_ANSWER[1])
            self._answer.copy_(torch.where(answer < _ANSWER[0], 0.0, answer))
            self._near = None
        return metrics


def _frozen_copy(model: CausalModules) -> Any:
    return deepcopy(model.abduction).requires_grad_(False)
