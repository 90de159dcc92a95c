"""Held-out figures, all by deterministic inference (seed S3 section 5).

eval/accuracy        argmax P over every labelled position        eval/base_accuracy   the base model's own top-1
eval/num_*           telling <NUM> from words                     eval/baseline_mdae   always the training median
eval/reg_*           |loc_Y - v| in the raw unit                  eval/coverage_90     raw Cauchy interval
dist/U_*             what U looks like                            dist/ovr_prob_sum_*  1 is calibrated
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.lora import adapters_disabled
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.regression import cauchy_nll
from cqwen_dist.parallel.collectives import gather_lists, sum_over
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.vocab_parallel import VocabParallelOutput, vocab_parallel_ovr, vocab_parallel_topk

Features = Callable[..., Tensor]  # (Batch on the device, keep [N]) -> z [N,H]
INTERVAL_90 = 6.313751514675043  # scales: tan(pi 0.45)
_SAMPLE = 4096  # values a batch of U keeps for its quantiles


class Evaluator:
    """Evaluates one model on one held-out set. Collective over the world: every rank takes part."""

    def __init__(
        self,
        model: CausalQwenModel,
        features: Features,
        batches: Iterable[Batch],
        groups: Groups,
        *,
        baseline_value: float | None,
        used_rows: int | None = None,
        gemm_dtype: torch.dtype = torch.float32,
    ) -> None:
        """batches: iterated anew at each evaluation. baseline_value: the training numbers' median, raw unit."""
        self.model, self.features, self.batches, self.groups = model, features, batches, groups
        self.baseline_value, self.used_rows, self.gemm_dtype = baseline_value, used_rows, gemm_dtype
        self.device = model.action.cls_weight.device
        self.base_accuracy: float | None = None

    @torch.no_grad()
    def measure_base(self) -> float:
        """The base model's own top-1: values unseen, adapters off, the heads as inherited. Only before training."""
        counts = torch.zeros(2, dtype=torch.float64, device=self.device)
        with adapters_disabled(self.model.transformer):
            for batch, keep in self._kept():
                unseen = replace(batch, numeric_values=torch.zeros_like(batch.numeric_values))
                ids = self._top1(self.model.abduction(self.features(unseen, keep)), rank_by="loc")
                labels = batch.labels.flatten()[keep]
                counts[0] += (ids == labels).sum()
                counts[1] += labels.numel()
        right, total = sum_over(counts).tolist()
        self.base_accuracy = right / max(total, 1)
        return self.base_accuracy

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """All figures, equal on every rank."""
        action, target, num_id = self.model.action, self.model.target, self.model.config.num_token_id
        counts: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=self.device))
        lists: dict[str, list[Tensor]] = defaultdict(list)
        generator = torch.Generator(self.device).manual_seed(0)  # the same individuals at every evaluation
        for batch, keep in self._kept():
            labels = batch.labels.flatten()[keep]
            u = self.model.abduction(self.features(batch, keep))
            u_prime = action.add_noise(u)
            words = self._words(u_prime, labels)
            best = self._top1(u_prime)
            is_num = labels == num_id
            said_num = best == num_id
            counts["tokens"] += labels.numel()
            counts["cls_loss"] += words.per_token.sum()
            counts["right"] += (best == labels).sum()
            counts["num_hit"] += (is_num & said_num).sum()
            counts["num_said"] += said_num.sum()
            counts["num_true"] += is_num.sum()
            learnt = batch.numeric_mask.flatten()[keep]
            raw = batch.numeric_labels.flatten()[keep][learnt]
            y = action.value(Cauchy(u_prime.loc[learnt], u_prime.scale[learnt]))
            goal = target.forward(raw).to(self.device)
            lists["nll"].append(cauchy_nll(y.loc, y.scale, goal))
            lists["error"].append((target.inverse(y.loc) - raw).abs())
            lists["inside"].append(((goal - y.loc).abs() <= INTERVAL_90 * y.scale).double())
            lists["prob_sum"].append(words.prob_sum)
            individual = u.sample(torch.rand(u.loc.shape, generator=generator, device=self.device))
            causal = Cauchy(individual, action.b_noise.abs().expand_as(individual))
            lists["prob_sum_causal"].append(self._words(causal, labels).prob_sum)
            lists["U_loc"].append(_some(u.loc))
            lists["U_scale"].append(_some(u.scale))
            if self.baseline_value is not None:
                lists["baseline"].append((raw - self.baseline_value).abs())
        return self._figures(counts, {k: gather_lists(torch.cat(v).double()) for k, v in lists.items()})

    def _figures(self, counts: dict[str, Tensor], lists: dict[str, Tensor]) -> dict[str, float]:
        names = ["tokens", "cls_loss", "right", "num_hit", "num_said", "num_true"]
        summed = sum_over(torch.stack([counts[name] for name in names]))
        c = dict(zip(names, summed.tolist(), strict=True))
        tokens = max(c["tokens"], 1)
        figures = {
            "eval/accuracy": c["right"] / tokens,
            "eval/cls_loss_mean": c["cls_loss"] / tokens,
            "eval/num_precision": c["num_hit"] / max(c["num_said"], 1),
            "eval/num_recall": c["num_hit"] / max(c["num_true"], 1),
            "eval/num_f1": 2 * c["num_hit"] / max(c["num_said"] + c["num_true"], 1),
        }
        if self.base_accuracy is not None:
            figures["eval/base_accuracy"] = self.base_accuracy
        if lists["error"].numel():
            figures["eval/reg_mae"] = float(lists["error"].mean())
            figures["eval/reg_mdae"] = _median(lists["error"])
            figures["eval/reg_nll"] = float(lists["nll"].mean())
            figures["eval/coverage_90"] = float(lists["inside"].mean())
            if lists.get("baseline") is not None:
                figures["eval/baseline_mdae"] = _median(lists["baseline"])
        for mode, name in (("standard", "prob_sum"), ("causal", "prob_sum_causal")):
            figures[f"dist/ovr_prob_sum_median_{mode}"] = _median(lists[name])
        for name in ("U_loc", "U_scale"):
            figures.update({f"dist/{name}_{k}": v for k, v in _summary(lists[name]).items()})
        return figures

    def _kept(self) -> Iterable[tuple[Batch, Tensor]]:
        for batch in self.batches:
            keep = batch.label_mask.flatten().nonzero()[:, 0]
            yield batch.to(self.device), keep.to(self.device)

    def _words(self, u_prime: Cauchy, labels: Tensor) -> VocabParallelOutput:
        action = self.model.action
        seen = action.word_part(u_prime)
        return vocab_parallel_ovr(
            seen.loc.to(self.gemm_dtype),
            seen.scale.to(self.gemm_dtype),
            action.cls_weight,
            action.cls_bias,
            action.threshold,
            labels,
            group=self.groups.vocab,
            vocab_start=action.vocab_start,
            vocab_size=action.vocab_size,
            used_rows=self.used_rows,
        )

    def _top1(self, u_prime: Cauchy, rank_by: str = "ovr") -> Tensor:
        return top1(self.model, u_prime, self.groups, self.gemm_dtype, rank_by)


def top1(model: CausalQwenModel, u_prime: Cauchy, groups: Groups, gemm_dtype: torch.dtype, rank_by: str) -> Tensor:
    """The best word of each token [N], by P ("ovr", over the rows that the tokenizer uses) or by loc_S ("loc", all).

    u_prime: Cauchy [N,C]. Collective over the vocabulary group.
    """
    action = model.action
    seen = action.word_part(u_prime)
    _, ids = vocab_parallel_topk(
        seen.loc.to(gemm_dtype),
        seen.scale.to(gemm_dtype),
        action.cls_weight,
        action.cls_bias,
        action.threshold,
        1,
        group=groups.vocab,
        vocab_start=action.vocab_start,
        used_rows=model.config.used_rows if rank_by == "ovr" else None,
        rank_by=rank_by,
    )
    return ids[:, 0]


def _median(values: Tensor) -> float:
    """The median of a 1-D CPU tensor of any length (torch.quantile refuses more than 16 million); nan of none."""
    return float(np.median(values.numpy())) if values.numel() else math.nan


def _some(values: Tensor) -> Tensor:
    """At most _SAMPLE values, evenly spread: quantiles of U need no more."""
    flat = values.flatten()
    return flat[:: max(1, flat.numel() // _SAMPLE)]


def _summary(values: Tensor) -> dict[str, float]:
    """mean, median, std, iqr (S3 5.4) of the sampled values."""
    if values.numel() < 2:
        return {}
    sampled = values[:: max(1, values.numel() // 1_000_000)]
    q1, median, q3 = torch.quantile(sampled, torch.tensor([0.25, 0.5, 0.75], dtype=values.dtype)).tolist()
    return {"mean": float(sampled.mean()), "median": median, "std": float(sampled.std()), "iqr": q3 - q1}
