"""KL(U || U at the start) against forgetting (seed S3 2.3): watched, or held.

    U at the start = the abduction as it was, of the base's features (adapters off, w_num and <NUM>'s row as they
                     began), in every stage; a run that begins with trained adapters has a KL from its first step on
    KL of a token  = the mean over the C dimensions of the closed form of two Cauchys (`ops.cauchy.Cauchy.kl`)

What it costs. While no feature group has ever been awake z itself is what it was, and the start's U is two products
[N,H]x[H,C] away, beside the six [N,C]x[C,V] of the loss. After that the start's features are a second forward pass of
the backbone, without gradient: at every step where KL is held (`hinge`, `dual`), at every `every`-th where it is
watched (`monitor`). A copy of the abduction, 2 H C numbers, is kept.

`hinge` adds beta times each token's excess over eps, so it decomposes over ranks and micro-batches. `dual` adds
weight * KL with weight = multiplier * (KL / eps)^4: far below eps hardly anything is held, near it the answer is there
at the next step, because an integral alone comes too late (KL is 0 at the start, then rises within some steps). After
each step the multiplier's logarithm moves by rate times how far the global mean was from its aim, faster up than down.
KL of the step before serves for the power, so the term is linear in the tokens and decomposes as the hinge does. Both
are tensors that no step waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.config import ConstraintConfig, UserError
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.lora import adapters_disabled, is_lora_b
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.parallel.collectives import sum_over
from cqwen_dist.run.files import let_read, written_whole

Features = Callable[[Batch, Tensor], Tensor]  # (batch on the device, keep [N]) -> z [N,H]
AIM = 0.8  # of eps: what the multiplier steers at, since the means of batches scatter
_STEEPNESS = 4  # of the weight's immediate answer (KL/eps)^4,
_ANSWER = (1e-3, 16.0)  # which stays within these
_FALL = 0.2  # how much slower than it rises the multiplier falls: KL is 0 at the start and will not stay there
_LEAST = 1e-2  # of beta: the multiplier falls no further


class ConstraintTerm(NamedTuple):
    """Of one micro-batch. loss: scalar to add, weighted; sums [4]: KL, drift, tokens over eps, the loss unweighted."""

    loss: Tensor
    sums: Tensor


class Constraint:
    """The start's U, and how far the present one is from it. Every rank holds the same."""

    def __init__(self, model: CausalQwenModel, config: ConstraintConfig, features: Features) -> None:
        """features: z as it is now, by the engine."""
        self.model, self.config, self._features = model, config, features
        self.device = model.action.cls_weight.device
        self.features_moved = False  # whether any of embedding and lora has ever been awake
        self._adapted = False  # whether the run began with adapters that were trained before
        self._abduction = _frozen_copy(model)
        self._embedding: tuple[Tensor, Tensor] | None = None
        self.unit: Tensor | float | None = None
        self.multiplier = torch.tensor(config.beta, device=self.device)
        self._answer = torch.tensor(_ANSWER[0], device=self.device)

    # --------------------------------------------------------------------------------------- the start

    @torch.no_grad()
    def begin(self, features: dict[str, Tensor], batches: Iterable[Batch]) -> None:
        """Take the present for the start. Collective over the world.

        features: the engine's parameters by name, whole. batches: this rank's share of some texts, for the spread of
        U's location: its standard deviation over tokens, with U's scale at the start added in quadrature, so that a
        dimension in which nothing varies (a number dimension) is measured in its own scale.
        """
        self._abduction = _frozen_copy(self.model)
        self._embedding = self._own(features["embedding.w_num"]), self._own(features["embedding.num_row"])
        self._adapted = any(bool(value.any()) for name, value in features.items() if is_lora_b(name))
        size = self.model.config.causal_hidden_size
        kept = []
        for batch in batches:
            keep = batch.kept.to(self.device)
            kept.append(self._abduction(self._features(batch.to(self.device), keep)))
        loc = torch.cat([u.loc for u in kept]).double() if kept else torch.zeros(0, size, dtype=torch.float64)
        scale = torch.cat([u.scale for u in kept]).double() if kept else torch.zeros(0, size, dtype=torch.float64)
        count = torch.tensor(float(len(loc)), dtype=torch.float64, device=loc.device)
        total = sum_over(torch.stack([loc.sum(0), scale.sum(0), count.expand(size)]))
        mean, mean_scale = total[0] / total[2].clamp(min=1), total[1] / total[2].clamp(min=1)
        variance = sum_over((loc - mean).square().sum(0)) / total[2].clamp(min=1)
        self.spread = (variance + mean_scale.square()).sqrt().float().to(self.device)
        self._set_unit()

    def _set_unit(self) -> None:
        named = self.config.unit
        self.unit = self.spread if named == "spread" else None if named == "scale" else float(named)

    def save(self, path: Path) -> None:
        """Write the start beside the run's other first things; one rank."""
        assert self._embedding is not None
        tensors = {f"abduction.{name}": value for name, value in self._abduction.state_dict().items()}
        tensors |= {"w_num": self._embedding[0], "num_row": self._embedding[1], "spread": self.spread}
        tensors["adapted"] = torch.tensor(self._adapted)
        with written_whole(path) as beside:
            save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, beside)
            let_read(beside)

    def load(self, path: Path, state: dict[str, Any]) -> None:
        """Put back what `save` wrote and `state_dict` gave. Raises `UserError`."""
        try:
            tensors = load_file(path)
            self._abduction = _frozen_copy(self.model)  # for what is no tensor in it: the floor of its scale
            self._abduction.load_state_dict(
                {name.removeprefix("abduction."): v for name, v in tensors.items() if name.startswith("abduction.")}
            )
            self._embedding = self._own(tensors["w_num"]), self._own(tensors["num_row"])
            self.spread = self._own(tensors["spread"])
            self._adapted = bool(tensors["adapted"])
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            allowed = "the file that the run's start left there (or loss.constraint.mode=off in a new run)"
            raise UserError("loss.constraint", str(path), f"{allowed}: {error}") from None
        self._set_unit()
        self.multiplier.fill_(state["multiplier"])
        self._answer.fill_(state["answer"])

    def state_dict(self) -> dict[str, float]:
        """What moves, for a checkpoint."""
        return {"multiplier": float(self.multiplier), "answer": float(self._answer)}

    def _own(self, value: Tensor) -> Tensor:
        return value.detach().clone().to(self.device)

    # ------------------------------------------------------------------------------------- the measure

    def due(self, step: int) -> bool:
        """Whether this step looks."""
        if self.config.mode == "monitor":
            return step % self.config.every == 0
        return self.config.mode != "off"

    @contextmanager
    def as_it_began(self) -> Iterator[None]:
        """Inside, features are the start's."""
        assert self._embedding is not None
        with adapters_disabled(self.model.transformer), self.model.features.embedding.using(*self._embedding):
            yield

    @property
    def second_pass(self) -> bool:
        """Whether z of the start is another than z, and must be computed."""
        return self.features_moved or self._adapted

    @torch.no_grad()
    def start_features(self, batch: Batch, keep: Tensor) -> Tensor:
        """z [N,H] as it was at the start. Collective where the engine's forward is."""
        with self.as_it_began():
            return self._features(batch, keep)

    def term(self, u: Cauchy, z_start: Tensor, weight: float) -> ConstraintTerm:
        """u [N,C] now, z_start [N,H]; weight: what the engine divides by, over the global number of tokens."""
        held = self.config.mode in ("hinge", "dual")
        with torch.no_grad():
            before = self._abduction(z_start)
        with torch.set_grad_enabled(held):
            kl = u.kl(before, self.unit).mean(-1)
            excess = (kl - self.config.eps).clamp(min=0.0)
            if self.config.mode == "hinge":
                penalty = self.config.beta * excess.sum()
            else:
                penalty = self.multiplier * self._answer * kl.sum() if held else torch.zeros((), device=self.device)
        with torch.no_grad():
            unit = u.scale.sqrt() * before.scale.sqrt() if self.unit is None else self.unit
            drift = ((u.loc - before.loc).abs() / unit).mean(-1).sum()
            sums = torch.stack([kl.sum(), drift, (excess > 0).sum().float(), penalty.detach()])
        return ConstraintTerm(weight * penalty, sums.detach())

    @torch.no_grad()
    def after_step(self, sums: Tensor, tokens: int) -> dict[str, Tensor]:
        """The step's metrics from the sums [4] of all ranks; dual: the multiplier moves. No host synchronisation."""
        kl, drift, over, loss = sums / max(tokens, 1)
        metrics = {"train/kl": kl, "train/kl_drift": drift, "train/kl_over_eps": over}
        if self.config.mode in ("hinge", "dual"):
            metrics["train/constraint_loss"] = loss
        if self.config.mode == "dual":
            metrics["train/kl_multiplier"] = (self.multiplier * self._answer).clone()
            off = (kl / (AIM * self.config.eps) - 1.0).clamp(-_FALL, 1.0)
            self.multiplier.mul_(torch.exp(self.config.rate * off)).clamp_(min=_LEAST * self.config.beta)
            self._answer.copy_((kl / self.config.eps).pow(_STEEPNESS).clamp(*_ANSWER))
        return metrics


def _frozen_copy(model: CausalQwenModel) -> Any:
    return deepcopy(model.abduction).requires_grad_(False)
