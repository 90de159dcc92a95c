"""The calibrated start: rows levelled, (C, gamma) chosen so that the OvR loss of real text is least, and its report.

With the seeds' constants argmax P is not argmax loc_S and the loss begins in the thousands (seeds S3 section 4, S1).
What a run chose stands in its start.json; a run that goes on does not choose again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.model.initialise import SEED_GAMMA, SEED_NOISE, set_scales
from cqwen_dist.model.levelling import LEVEL_TOKENS, level_logits
from cqwen_dist.parallel.collectives import gather_lists, sum_over
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.vocab_parallel import vocab_parallel_ovr, vocab_parallel_topk

if TYPE_CHECKING:
    from cqwen_dist.model.causal_qwen import CausalQwenModel


@dataclass(frozen=True)
class Calibration:
    """What the calibrated start chose and how it looks before the first step."""

    threshold: float  # C
    gamma: float  # total scale of U' on the word dimensions
    loss: float  # mean OvR loss of the calibration tokens
    seed_loss: float  # the same at the seeds' start (C = 0, gamma = softplus(1) + 0.1)
    accuracy: float  # of argmax P
    base_accuracy: float  # of argmax loc_S on the same features
    agreement: float  # share of tokens on which the two are one word
    seed_accuracy: float  # of argmax P at the seeds' start
    uniform_loss: float  # 1 + ln V, the loss of P = 1/V for every word: a run that ends here has learnt nothing
    prob_sum_median: float  # median over tokens of sum_k P_k; 1 is calibrated
    tokens: int
    levelled: float  # share of the normaliser's variance that `levelling` takes from the logits; 0: rows untouched

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@torch.no_grad()
def calibrate(
    model: CausalQwenModel,
    batches: Iterable[Batch],
    *,
    groups: Groups | None = None,
    features: Callable[[Batch, Tensor], Tensor] | None = None,
    b_noise_init: float | None = None,
    max_tokens: int = 1024,
    used_rows: int | None = None,
    level_batches: Iterable[Batch] | None = None,
) -> Calibration:
    """Level the rows of W_cls (`levelling`), choose (C, gamma) that minimise the mean OvR loss, and set them.

    batches: what the training collator yields, this rank's share; the first max_tokens labelled positions of each
    rank are used. features: (Batch, keep) -> z [N,H] (default the model's own; the engine's under ZeRO).
    level_batches: what rows are levelled by (None: `batches`); empty, no row of W_cls changes.
    A grid of 5 x 5, then a pattern search; gamma is one for all word dimensions, so scale_S = gamma ||W_k||_1. With
    b_noise_init the total may come out larger than the best gamma; what is reported is of the total that is set.
    Collective over the world: with groups, every rank brings the same number of batches, and ends with the same
    values. Raises ValueError where no rank holds a label.
    """
    z, labels = _labelled_features(model, batches, features or model.kept_features, max_tokens, groups is not None)
    vocab = None if groups is None else groups.vocab
    action = model.action
    loc = action.word_part(model.abduction(z)).loc.contiguous()
    count = _sum(torch.tensor(float(labels.numel()), device=z.device), groups)
    if not count:
        raise ValueError("no labelled positions to calibrate on")

    def evaluate(threshold: float, gamma: float) -> tuple[float, Tensor]:
        out = vocab_parallel_ovr(
            loc,
            torch.full_like(loc, gamma),
            action.cls_weight,
            action.cls_bias,
            torch.tensor(threshold, device=z.device),
            labels,
            group=vocab,
            vocab_start=action.vocab_start,
            vocab_size=action.vocab_size,
            used_rows=used_rows,
        )
        return _sum(out.per_token.sum(), groups) / count, out.prob_sum

    def top_word(rank_by: str, threshold: float) -> Tensor:
        _, ids = vocab_parallel_topk(
            loc,
            torch.ones_like(loc),  # one gamma for all words moves no rank
            action.cls_weight,
            action.cls_bias,
            torch.full_like(action.threshold, threshold),
            1,
            group=vocab,
            vocab_start=action.vocab_start,
            rank_by=rank_by,
        )
        return ids[:, 0]

    def share(same: Tensor) -> float:
        return _sum(same.float().sum(), groups) / count

    seed_loss, seed_accuracy = evaluate(0.0, SEED_GAMMA + SEED_NOISE)[0], share(top_word("ovr", 0.0) == labels)
    levelled = 0.0
    if level_batches is None:
        levelled = level_logits(model, loc, groups)
    elif more := list(level_batches):
        seen, _ = _labelled_features(model, more, features or model.kept_features, LEVEL_TOKENS, groups is not None)
        levelled = level_logits(model, action.word_part(model.abduction(seen)).loc.contiguous(), groups)
    middle, spread, norm = _logit_range(model, loc, groups)
    best = _search(lambda f, g: evaluate(middle + f * spread, 10.0**g * spread / norm)[0])
    threshold, gamma = middle + best[0] * spread, 10.0 ** best[1] * spread / norm
    gamma = set_scales(model, gamma, b_noise_init)
    action.threshold.fill_(threshold)
    loss, prob_sum = evaluate(threshold, gamma)
    if groups is not None:
        prob_sum = gather_lists(prob_sum)
    said, base_said = top_word("ovr", threshold), top_word("loc", threshold)
    return Calibration(
        threshold=threshold,
        gamma=gamma,
        loss=loss,
        seed_loss=seed_loss,
        accuracy=share(said == labels),
        base_accuracy=share(base_said == labels),
        agreement=share(said == base_said),
        seed_accuracy=seed_accuracy,
        uniform_loss=1.0 + math.log(action.vocab_size),
        prob_sum_median=float(prob_sum.quantile(0.5)),
        tokens=int(count),
        levelled=max(levelled, 0.0),
    )


def _labelled_features(
    model: CausalQwenModel,
    batches: Iterable[Batch],
    features: Callable[[Batch, Tensor], Tensor],
    max_tokens: int,
    collective: bool,
) -> tuple[Tensor, Tensor]:
    """z [N,H] and labels [N] of the first max_tokens labelled positions of this rank (N may be 0).

    collective: features may need the other ranks (ZeRO-3), so no rank leaves a batch out.
    """
    device = model.action.cls_weight.device
    kept: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in batches:
        index = batch.label_mask.flatten().nonzero()[:, 0]
        keep = index.to(device)
        there = batch.to(device)
        kept.append(features(there, keep))
        labels.append(there.labels.flatten()[keep])
        if not collective and sum(part.numel() for part in labels) >= max_tokens:
            break
    if not kept:
        return torch.zeros(0, model.config.hidden_size, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    return torch.cat(kept)[:max_tokens], torch.cat(labels)[:max_tokens]


def _logit_range(model: CausalQwenModel, loc: Tensor, groups: Groups | None) -> tuple[float, float, float]:
    """(mean logit, mean top logit minus it, mean ||W_k||_1): the units the search works in."""
    action = model.action
    vocab = None if groups is None else groups.vocab
    one = torch.ones((), device=loc.device)
    top, _ = vocab_parallel_topk(
        loc,
        torch.ones_like(loc),
        action.cls_weight,
        action.cls_bias,
        torch.zeros_like(one),
        1,
        group=vocab,
        vocab_start=action.vocab_start,
        rank_by="loc",
    )
    count = max(_sum(one * loc.shape[0], groups), 1.0)
    mean_row = action.cls_weight.sum(0) / action.vocab_size
    norms = action.cls_weight.abs().sum(1)
    norm = norms.sum() / action.vocab_size
    if groups is not None:
        sum_over(mean_row, groups.vocab)
        sum_over(norm, groups.vocab)
    mean = _sum((loc @ mean_row).sum(), groups) / count
    spread = _sum(top.sum(), groups) / count - mean
    return mean, max(spread, 1e-3), max(float(norm), 1e-6)


def _search(loss: Callable[[float, float], float]) -> tuple[float, float]:
    """Minimise over (share of the logits' range, log10 of the scale in that unit): a 5 x 5 grid, then 5 halvings."""
    seen: dict[tuple[float, float], float] = {}

    def at(point: tuple[float, float]) -> float:
        if point not in seen:
            value = loss(*point)
            seen[point] = value if math.isfinite(value) else math.inf
        return seen[point]

    best = min(((f, g) for f in (0.25, 0.5, 0.75, 1.0, 1.25) for g in (-4.0, -3.0, -2.0, -1.0, 0.0)), key=at)
    step = (0.125, 0.5)
    for _ in range(5):
        around = [(best[0] + i * step[0], best[1] + j * step[1]) for i, j in ((1, 0), (-1, 0), (0, 1), (0, -1))]
        best = min([best, *around], key=at)
        step = (step[0] / 2, step[1] / 2)
    return best


def _sum(value: Tensor, groups: Groups | None) -> float:
    """A scalar summed over the world."""
    total = value.detach().double().clone()
    if groups is not None:
        sum_over(total, groups.world)
    return float(total)
