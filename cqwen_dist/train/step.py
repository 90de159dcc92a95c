"""One optimizer step: micro-batches in, the global mean's gradient, the step, its figures out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.config import Config, UserError
from cqwen_dist.model.losses import LossTerms, fused_loss
from cqwen_dist.parallel.collectives import gather_rows, sum_over
from cqwen_dist.train.engine import Engine
from cqwen_dist.train.evaluate import top1
from cqwen_dist.train.stages import StagePlan

ACCURACY_EVERY = 10  # steps between looks at train/accuracy, which costs two GEMMs the loss does not need
ACCURACY_TOKENS = 256  # tokens of a rank that it looks at


@dataclass(frozen=True)
class StepCounts:
    """What all ranks bring to one optimizer step, known before it begins."""

    words: float  # denominator of L_cls
    numbers: float  # denominator of L_reg
    tokens: int  # input positions, for tokens/s
    kept: list[list[int]]  # [micro-batch][rank of the vocabulary group]: kept positions


class Stepper:
    """Takes optimizer steps with an engine. Losses are sums over tokens, divided once, by counts of all ranks."""

    def __init__(self, engine: Engine, config: Config, gemm_dtype: torch.dtype, used_rows: int | None) -> None:
        """gemm_dtype: of the word head's products. used_rows: leave words from here on out of the loss."""
        self.engine, self.config = engine, config
        self.model, self.groups, self.device = engine.model, engine.groups, engine.runtime.device
        self.gemm_dtype, self.used_rows = gemm_dtype, used_rows
        self.class_weights = self._class_weights()

    def __call__(self, micro_batches: list[Batch], plan: StagePlan, step: int) -> tuple[dict[str, Any], int]:
        """One optimizer step; returns its figures (tensors, not yet read) and the input tokens of all ranks."""
        torch.manual_seed((self.config.train.seed * 1_000_003 + step) * 4099 + self.engine.runtime.rank)  # dropout's
        reg_weight = self.config.loss.reg_weight if plan.stage.reg_weight is None else plan.stage.reg_weight
        keeps = [batch.label_mask.flatten().nonzero()[:, 0] for batch in micro_batches]
        counts = self._exchange(micro_batches, keeps)
        sums = torch.zeros(5, device=self.device)
        right = None
        for i, (batch, keep) in enumerate(zip(micro_batches, keeps, strict=True)):
            last = i == len(micro_batches) - 1
            there, keep = batch.to(self.device), keep.to(self.device)
            z = self.engine.forward(there, keep)
            terms = self._loss(z, there, keep, counts, counts.kept[i], reg_weight)
            self.engine.backward(terms.loss, last)
            num_label = (there.labels.flatten()[keep] == self.model.config.num_token_id).float()
            p_num = (terms.p_num * num_label).sum()
            sums += torch.stack([terms.cls_sum, terms.reg_sum, terms.prob_sum.sum(), p_num, num_label.sum()])
            if last and (step % ACCURACY_EVERY == 0 or step == plan.stop - 1):
                right = self._accuracy(z, there, keep)
        norm = self.engine.step()
        cls_sum, reg_sum, prob_sum, p_num, num_labels = sum_over(sums)
        cls_mean = cls_sum / max(counts.words, 1)
        reg_mean = reg_sum / max(counts.numbers, 1)
        figures = {
            "train/total_loss": cls_mean + reg_weight * reg_mean,
            "train/cls_loss_mean": cls_mean,
            "train/reg_loss_effective": reg_mean,
            "train/prob_sum_mean": prob_sum / max(sum(map(sum, counts.kept)), 1),
            "train/p_num_mean": p_num / num_labels.clamp(min=1),
            "train/grad_norm": norm,
            "train/lr": plan.stage.lr * plan.factor(step),
        }
        if right is not None:
            hits, seen = sum_over(right)
            figures["train/accuracy"] = hits / seen.clamp(min=1)
        return figures, counts.tokens

    def _loss(
        self, z: Tensor, batch: Batch, keep: Tensor, counts: StepCounts, kept: list[int], reg_weight: float
    ) -> LossTerms:
        """The fused loss of one micro-batch, weighted so that the ranks' average is the global mean."""
        loss, world = self.config.loss, self.groups.world_size
        labels = batch.labels.flatten()[keep]
        return fused_loss(
            self.model.action,
            self.model.abduction(z),
            labels,
            self.model.target.forward(batch.numeric_labels.flatten()[keep]),
            batch.numeric_mask.flatten()[keep],
            token_weight=world / max(counts.words, 1),
            number_weight=reg_weight * world / max(counts.numbers, 1),
            num_token_id=self.model.config.num_token_id,
            group=self.groups.vocab,
            token_counts=kept,
            gemm_dtype=self.gemm_dtype,
            alpha=loss.alpha,
            gate=loss.gate,
            gate_grad=loss.gate_grad,
            class_weights=self.class_weights,
            impl=loss.impl,
            vocab_reduction=loss.vocab_reduction,
            used_rows=self.used_rows,
        )

    def _exchange(self, micro_batches: list[Batch], keeps: list[Tensor]) -> StepCounts:
        """Counts over all ranks and micro-batches, from the CPU's copies: one small all-gather a step."""
        soft = self.config.loss.gate == "soft"
        attended = self.config.loss.cls_denominator == "attention"
        kept = [keep.numel() for keep in keeps]
        words = sum(int(b.attention_mask.sum()) for b in micro_batches) if attended else sum(kept)
        numbers = sum(kept) if soft else sum(int(b.numeric_mask.sum()) for b in micro_batches)
        tokens = sum(int(b.attention_mask.sum()) for b in micro_batches)
        table = self._gather([words, numbers, tokens], kept)
        totals = [sum(row[k] for row in table) for k in range(3)]
        first = self.engine.runtime.rank - self.groups.vocab_rank  # vocabulary groups are consecutive ranks
        group = table[first : first + self.groups.vocab_size]
        return StepCounts(totals[0], totals[1], totals[2], [[row[4 + i] for row in group] for i in range(len(kept))])

    def give_up(self, micro_steps: int) -> None:
        """A rank that was told to stop while it waited for data says so in its place in the exchange: `Stopped`."""
        self._gather([0, 0, 0], [0] * micro_steps)

    def _gather(self, sums: list[int], kept: list[int]) -> list[list[int]]:
        """[rank][sums, told to stop, kept] of all ranks. Raises `Stopped` on all of them where any was told to."""
        stop = self.engine.runtime.stop
        mine = torch.tensor([*sums, stop.reason is not None, *kept], device=self.device)
        table: list[list[int]] = gather_rows(mine).tolist()
        stop.act_on(any(row[3] for row in table))
        return table

    @torch.no_grad()
    def _accuracy(self, z: Tensor, batch: Batch, keep: Tensor) -> Tensor:
        """[right, seen] of argmax P over some of the last micro-batch's tokens."""
        some = slice(0, ACCURACY_TOKENS)
        u_prime = self.model.action.add_noise(self.model.abduction(z.detach()[some]))
        ids = top1(self.model, u_prime, self.groups, self.gemm_dtype, "ovr")
        labels = batch.labels.flatten()[keep][some]
        return torch.stack([(ids == labels).sum().float(), torch.full((), labels.numel(), device=z.device)])

    def _class_weights(self) -> Tensor | None:
        """[rows] of this rank's words; words not named weigh 1."""
        named = self.config.loss.class_weights
        if named is None:
            return None
        start = self.model.action.vocab_start
        stop = start + self.model.action.rows
        weights = torch.ones(stop - start, device=self.device)
        vocab = self.model.config.vocab_size
        for word, weight in named.items():
            if word >= vocab:
                raise UserError(f"loss.class_weights.{word}", weight, f"word ids below {vocab}")
            if start <= word < stop:
                weights[word - start] = weight
        return weights
