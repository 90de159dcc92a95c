"""One optimizer step: takes micro-batches, steps by the gradient of the global mean, returns metrics."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from cqwen_dist.batch import IGNORE_INDEX, Batch, Texts
from cqwen_dist.config.training import LossConfig
from cqwen_dist.heads.fused_loss import LossOptions, LossTerms, TokenLabels, fused_loss
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.seen import Wanted
from cqwen_dist.ops.regression import counts_text
from cqwen_dist.parallel.collectives import Stopped, gather_rows, sum_over
from cqwen_dist.training.constraint import Constraint
from cqwen_dist.training.stages import StagePlan
from cqwen_dist.training.zero.engine import Engine

ACCURACY_EVERY = 10  # steps between values of train/accuracy
_ASKS = "find_packed_sequence_indices"  # of transformers' `masking_utils`


@dataclass(frozen=True)
class StepCounts:
    """Counts over all ranks for one optimizer step, exchanged before its first forward pass."""

    words: float  # denominator of L_cls
    numbers: float  # denominator of L_reg
    tokens: int  # input positions, for tokens/s
    labels: list[list[int]]  # label positions by [micro-batch][rank of the vocabulary group]
    all_labels: int  # label positions of all ranks and micro-batches


@dataclass
class Stepper:
    """Takes optimizer steps with an engine. Losses are sums over tokens, divided once, by global counts."""

    engine: Engine
    constraint: Constraint
    loss: LossConfig
    options: LossOptions
    seed: int  # for dropout
    stop_reason: Callable[[], str | None] = lambda: None  # why this rank is to stop; None: it is not

    def __post_init__(self) -> None:
        self.model, self.groups, self.device = self.engine.model, self.engine.groups, self.engine.device

    def __call__(
        self, micro_batches: list[Batch], plan: StagePlan, step: int, cached: list[Tensor] | None = None
    ) -> tuple[dict[str, Any], int]:
        """Take one optimizer step. Returns its metrics (tensors still on the device) and the global input tokens.

        cached: z [N,H] of each micro-batch's label positions from a feature cache, without its extra columns.
        """
        # For dropout: other masks on each rank, and the same masks when a resumed run takes this step again
        torch.manual_seed((self.seed * 1_000_003 + step) * 4099 + self.groups.rank)
        reg_weight = plan.reg_weight(step, self.loss.reg_weight)
        measures_kl = self.constraint.due(step)
        words = self.options.words
        counts_hits = words and (step % ACCURACY_EVERY == 0 or step == plan.stop - 1)

        # Denominators over all ranks, before any loss: each micro-batch then adds its part of the global mean
        keeps = [batch.learnt(words) for batch in micro_batches]
        counts = self._exchange(micro_batches, keeps)

        # Gradients, accumulated over micro-batches
        totals = torch.zeros(12, device=self.device)
        sums, kl_sums, right = totals[:6], totals[6:10], totals[10:]
        for i, (batch, keep) in enumerate(zip(micro_batches, keeps, strict=True)):
            last = i == len(micro_batches) - 1
            batch_on_device, keep = batch.to(self.device), keep.to(self.device, non_blocking=True)
            labels = batch_on_device.labels.flatten()[keep]
            second = measures_kl and self.constraint.second_pass
            # The CPU batch knows its texts; asking the device would synchronise
            with documents_of(batch.texts, len(batch.input_ids)):
                z_start = self.constraint.start_features(batch_on_device, keep) if second else None
                if cached is None:
                    z = self.engine.forward(batch_on_device, keep)
                else:
                    z = _stored(cached[i], batch, words).to(self.device, non_blocking=True)
                    z = self.model.with_beside(z, batch_on_device, keep)
            u = self.model.abduction(z)
            terms = self._loss(u, batch_on_device, keep, counts, i, reg_weight, counts_hits)
            loss = terms.loss
            if measures_kl:  # times the world size, as the engine averages gradients over the ranks
                weight = self.groups.world_size / max(counts.all_labels, 1)
                penalty, own = self.constraint.term(u, z.detach() if z_start is None else z_start, weight)
                loss = loss + penalty
                kl_sums += own
            self.engine.backward(loss, last)
            num_label = (labels == self.model.config.num_token_id).float()
            p_num = (terms.p_num * num_label).sum()
            prob_sum = p_num if terms.prob_sum is None else terms.prob_sum.sum()
            sums += torch.stack([terms.cls_sum, terms.nll_sum, terms.reg_sum, prob_sum, p_num, num_label.sum()])
            if terms.best is not None:
                right += torch.stack([(terms.best == labels).sum(), (labels != IGNORE_INDEX).sum()])

        # The step waits for the gradient norm. All metric sums share one all-reduce, for which the host does not wait.
        norm = self.engine.step()
        hits, seen = sum_over(totals)[10:]
        metrics = self._metrics(sums, norm, counts, reg_weight)
        metrics |= {"train/lr": plan.stage.lr * plan.factor(step), "train/reg_weight": reg_weight}
        if measures_kl:
            metrics |= self.constraint.after_step(kl_sums, counts.all_labels)
            if "train/constraint_loss" in metrics:
                metrics["train/total_loss"] = metrics["train/total_loss"] + metrics["train/constraint_loss"]
        if counts_hits:
            metrics["train/accuracy"] = hits / seen.clamp(min=1)
        return metrics, counts.tokens

    def _metrics(self, sums: Tensor, norm: float, counts: StepCounts, reg_weight: float) -> dict[str, Any]:
        """sums [6] over all ranks: L_cls, -log softmax, L_reg, P, P of <NUM> at <NUM> labels, count of <NUM> labels."""
        cls_sum, nll_sum, reg_sum, prob_sum, p_num, num_labels = sums
        cls_mean, nll_mean = cls_sum / max(counts.words, 1), nll_sum / max(counts.words, 1)
        reg_mean = reg_sum / max(counts.numbers, 1)
        weight, words = self.options.ovr.terms.softmax_weight, {}
        if self.options.words:
            words = {
                **({"train/perplexity": nll_mean.exp()} if weight else {}),
                "train/cls_loss_mean": cls_mean,
                "train/prob_sum_mean": prob_sum / max(counts.all_labels, 1),
                "train/p_num_mean": p_num / num_labels.clamp(min=1),
            }
        return {
            "train/total_loss": cls_mean + weight * nll_mean + reg_weight * reg_mean,
            **words,
            "train/reg_loss_effective": reg_mean,
            "train/grad_norm": norm,
            "train/clipped": float(self.engine.clipped),
        }

    def _loss(
        self, u: Cauchy, batch: Batch, keep: Tensor, counts: StepCounts, i: int, reg_weight: float, counts_hits: bool
    ) -> LossTerms:
        """The fused loss of micro-batch i, weighted so that the average over ranks is the global mean."""
        world, options = self.groups.world_size, self.options
        if counts_hits:
            options = replace(options, ovr=replace(options.ovr, seen=Wanted(self.model.config.used_rows)))
        return fused_loss(
            self.model.action,
            u,
            TokenLabels(batch.labels.flatten()[keep], self.model.action.number_head.labels(batch, keep)),
            options,
            token_weight=world / max(counts.words, 1),
            number_weight=reg_weight * world / max(counts.numbers, 1),
            group=self.groups.vocab,
            token_counts=counts.labels[i],
        )

    def _exchange(self, micro_batches: list[Batch], keeps: list[Tensor]) -> StepCounts:
        """Exchange counts over all ranks and micro-batches in one small all-gather. Batches are still on the CPU."""
        kept = [keep.numel() for keep in keeps]
        tokens = sum(int(b.attention_mask.sum()) for b in micro_batches)
        words = sum(kept)
        numbers = sum(kept) if counts_text(self.options.gate) else sum(int(b.numeric_mask.sum()) for b in micro_batches)
        table = self._gather([words, numbers, tokens], kept)
        first = self.groups.rank - self.groups.vocab_rank  # vocabulary groups are consecutive ranks
        by_micro_batch = table[first : first + self.groups.vocab_size, 4:].T.tolist()
        words, numbers, tokens = table[:, :3].sum(0).tolist()
        all_labels = int(table[:, 4:].sum())
        return StepCounts(words, numbers, tokens, by_micro_batch, all_labels)

    def give_up(self, micro_steps: int) -> None:
        """Join the exchange without batches to stop the other ranks. Raises `Stopped`."""
        self._gather([0, 0, 0], [0] * micro_steps)

    def _gather(self, sums: list[int], kept: list[int]) -> Tensor:
        """All-gather to [rank, (*sums, stop flag, *kept)], int64 on the CPU.

        kept: the number of label positions of each micro-batch. Raises `Stopped` on all ranks if any rank received a
        stop request.
        """
        # The stop flag travels with the counts: no rank can enter a step that another rank leaves
        reason = self.stop_reason()
        table = torch.tensor([[*sums, reason is not None, *kept]])
        if self.groups.world_size > 1:  # the only other host synchronisation of a step; the first is the norm
            table = gather_rows(table[0].to(self.device, non_blocking=True)).cpu()
        if bool(table[:, 3].any()):
            raise Stopped(reason)
        return table


def _stored(z: Tensor, batch: Batch, words: bool) -> Tensor:
    """The learnt positions of z [n,H], which a feature cache has of all label positions of a batch."""
    labelled = batch.label_mask
    if len(z) != int(labelled.sum()):  # these features belong to other samples
        raise RuntimeError(f"the feature cache has {len(z)} positions if the batch has {int(labelled.sum())}")
    return z if words else z[batch.numeric_mask[labelled]]


@contextmanager
def documents_of(texts: Texts, rows: int) -> Iterator[None]:
    """Inside, answer transformers' question whether rows are packed from the CPU copy of the batch, with `rows` rows.

    transformers reads the positions on the device, which synchronises in each forward pass.
    """
    packed = len(texts.lengths) > rows

    def documents(positions: Tensor) -> Tensor | None:
        """Document index of each position within its row [B,T]; None if each row has one document."""
        if not packed:
            return None
        return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=1) != 1).cumsum(1)

    asked = getattr(masking_utils, _ASKS, None)
    setattr(masking_utils, _ASKS, documents)
    try:
        yield
    finally:
        setattr(masking_utils, _ASKS, asked)
