"""The search for (C, gamma) of the calibrated start. Logits are computed once, and their histogram gives the loss.

At the start scale_S,k = gamma ||W_k||_1 for all tokens. So the OvR loss for any (C, gamma) is a sum over pairs
(loc_S, ||W_k||_1). Labels enter individually, negatives as histogram counts. Only this module stores [tokens, rows],
for about a thousand tokens per rank.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.ops.cauchy import log_prob_above, prob_above
from cqwen_dist.ops.ovr.head import chunk_rows
from cqwen_dist.ops.products import product
from cqwen_dist.parallel.collectives import gather_rows
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.mappings import exchange_counts, gather_tokens, sum_partials
from cqwen_dist.parallel.vocab_parallel import own_part

LOC_CELLS = 8192  # over the range of all logits: a few hundredths of a nat each
NORM_CELLS = 24  # logarithmic cells from the smallest to the largest norm
STEPS, LEAST_STEP = 48, 1e-3  # maximum number of steps, and the smallest step relative to the range of the logits


class Histogram(NamedTuple):
    """Histogram of (logit, norm) over all used words and tokens, and the labels. Equal on all ranks; float64, CPU."""

    loc: Tensor  # [cells] middle of each
    norm: Tensor  # [cells]
    words: Tensor  # [cells] counts, labels included
    label_loc: Tensor  # [n]
    label_norm: Tensor  # [n]
    middle: float  # mean logit
    spread: float  # mean top logit minus the mean logit

    def loss(self, threshold: float, gamma: float) -> float:
        """Mean OvR loss per token."""
        rest = -log_prob_above(gamma * self.norm, self.loc - threshold)
        scale, gap = gamma * self.label_norm, threshold - self.label_loc
        labels = log_prob_above(scale, -gap) - log_prob_above(scale, gap)
        return float((self.words * rest).sum() + labels.sum()) / max(len(self.label_loc), 1)


class StartLogits:
    """loc_S [n, rows] of this rank's rows for the n tokens of its vocabulary group, kept during the search."""

    def __init__(self, action: ActionNetwork, loc: Tensor, labels: Tensor, groups: Groups) -> None:
        """loc [N,C_w] loc_U, labels [N]: this rank's tokens."""
        self.action, self.groups, self.start = action, groups, action.vocab_start
        counts = exchange_counts(len(loc), groups.vocab, loc.device)
        self._own = own_part(counts, groups.vocab_rank)
        self.loc, self.labels = (gather_tokens(part, counts, groups.vocab) for part in (loc, labels))
        self.tokens = sum(exchange_counts(len(loc), groups.world, loc.device))
        self.logits = loc.new_empty(len(self.loc), action.rows)
        for at in range(0, action.rows, step := max(1024, chunk_rows(self.loc))):
            rows = slice(at, at + step)
            self.logits[:, rows] = product(self.loc, action.cls_weight[rows]) + action.cls_bias[rows]

    def take(self, v: Tensor) -> None:
        """Update the logits after v [C_w] was subtracted from all rows."""
        self.logits -= (self.loc @ v.to(self.loc))[:, None]

    def redo(self, words: Sequence[int]) -> None:
        """Recompute the logits of words whose rows have changed."""
        action = self.action
        if at := [word - self.start for word in words if word - self.start in range(action.rows)]:
            self.logits[:, at] = product(self.loc, action.cls_weight[at]) + action.cls_bias[at]

    def at(self, threshold: float, gamma: float) -> tuple[float, Tensor, Tensor]:
        """(mean loss of all ranks' tokens, argmax P [n], this rank's part of sum P [n])."""
        norms = self.action.row_norms()
        loss = torch.zeros((), dtype=torch.float64, device=norms.device)
        prob_sum = torch.zeros(len(self.loc), device=norms.device)
        step = chunk_rows(self.loc, 1)
        for logits, norm in zip(self.logits.split(step, 1), norms.split(step), strict=True):
            gap, scale = threshold - logits, (gamma * norm).expand(len(self.loc), -1)
            # One angle for P and log(1 - P): that of the rarer side, as in `ops.ovr.tile`
            above, rarer = gap < 0, prob_above(scale, gap.abs())
            loss -= torch.where(above, rarer.log(), torch.log1p(-rarer)).double().sum()
            prob_sum += torch.where(above, 1 - rarer, rarer).sum(1)
        rows_at, label_at = self._labels()
        gap = threshold - self.logits[rows_at, label_at]
        scale = gamma * norms[label_at]
        loss += (log_prob_above(scale, -gap) - log_prob_above(scale, gap)).double().sum()
        _, best = self._largest((self.logits - threshold) / norms.clamp(min=1e-30))
        return self._total(loss) / max(self.tokens, 1), best, prob_sum

    def best_logit(self) -> Tensor:
        """argmax loc_S [n] over all rows."""
        return self._largest(self.logits)[1]

    def p_of(self, word: int, threshold: float, gamma: float) -> Tensor:
        """P [n] for one word."""
        p = torch.zeros(len(self.loc), device=self.loc.device)
        if (at := word - self.start) in range(self.action.rows):
            p = prob_above((gamma * self.action.row_norms()[at]).expand(len(p)), threshold - self.logits[:, at])
        return sum_partials(p, self.groups.vocab)

    def histogram(self) -> Histogram:
        """Histogram of the current logits."""
        logits, norms, world = self.logits, self.action.row_norms().clamp(min=1e-30), self.groups.world

        # Cells, the same on every rank
        low, high = self._range(logits)
        least, largest = self._range(norms.log())
        cell, wide = max(high - low, 1e-6) / LOC_CELLS, max(largest - least, 1e-6) / NORM_CELLS
        loc = low + cell * (torch.arange(LOC_CELLS, dtype=torch.float64) + 0.5)
        norm = (least + wide * (torch.arange(NORM_CELLS, dtype=torch.float64) + 0.5)).exp()
        loc, norm = loc.repeat_interleave(NORM_CELLS), norm.repeat(LOC_CELLS)

        # Pairs in each
        column = ((norms.log() - least) / wide).long().clamp(0, NORM_CELLS - 1)
        count = torch.zeros(len(loc), dtype=torch.float64, device=norms.device)
        step = chunk_rows(logits, 1)
        for part, columns in zip(logits.split(step, 1), column.split(step), strict=True):
            row = ((part - low) / cell).long().clamp_(0, LOC_CELLS - 1)
            count += torch.bincount((row * NORM_CELLS + columns).flatten(), minlength=len(count))
        count = sum_partials(count, world).cpu()

        # Labels, and the range of the search
        rows_at, label_at = self._labels()
        own = torch.stack([logits[rows_at, label_at], norms[label_at]], 1)
        labels = gather_tokens(own, exchange_counts(len(own), world, own.device), world).double().cpu()
        middle = float((count * loc).sum() / count.sum().clamp(min=1))
        spread = max(self.mean(self._largest(logits)[0]) - middle, 1e-3)
        seen = count > 0
        return Histogram(loc[seen], norm[seen], count[seen], labels[:, 0], labels[:, 1], middle, spread)

    def mean(self, values: Tensor) -> float:
        """The mean over all tokens of the world of values [n] of the group's tokens."""
        return self._total(values[self._own].double().sum()) / max(self.tokens, 1)

    def of_all_ranks(self, part: Tensor) -> Tensor:
        """[n] summed over the ranks of the group, for all tokens of the world."""
        own, world = sum_partials(part, self.groups.vocab)[self._own], self.groups.world
        return gather_tokens(own, exchange_counts(len(own), world, own.device), world)

    def _labels(self) -> tuple[Tensor, Tensor]:
        """(token, row) of the labels in this rank's rows."""
        here = (self.labels >= self.start) & (self.labels < self.start + self.action.rows)
        return here.nonzero()[:, 0], self.labels[here] - self.start

    def _largest(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """(largest score, its word; the first of equals) [n] over the group's rows; scores: of this rank's rows."""
        value, word = scores.new_full((len(scores),), -math.inf), self.labels.new_zeros(len(scores))
        if scores.shape[1]:
            value, word = scores.max(1)
        word = word + self.start
        if self.groups.vocab_size > 1:
            values, words = gather_rows(value, self.groups.vocab), gather_rows(word, self.groups.vocab)
            value, best = values.max(0)
            word = words.gather(0, best[None])[0]
        return value, word

    def _range(self, values: Tensor) -> tuple[float, float]:
        """(least, largest) of all ranks."""
        own = values.new_tensor([math.inf, -math.inf], dtype=torch.float64)
        if values.numel():
            own = torch.stack(values.aminmax()).double()
        every = gather_tokens(own[None], [1] * self.groups.world_size, self.groups.world)
        return float(every[:, 0].min()), float(every[:, 1].max())

    def _total(self, value: Tensor) -> float:
        """A float64 scalar summed over the world."""
        return float(sum_partials(value, self.groups.world))


def best_threshold_and_gamma(seen: Histogram) -> tuple[float, float]:
    """(C, gamma) with the lowest loss: a 5 x 5 grid over shares of the logits' range and powers of ten, then local
    search.

    A step moves to the best of four neighbours, or halves their distance if none is better. On texts unfamiliar to the
    base, the best C is far above the mean top logit.
    """
    typical = float((seen.words * seen.norm).sum() / seen.words.sum().clamp(min=1)) or 1.0

    def point(share: float, power: float) -> tuple[float, float]:
        return seen.middle + share * seen.spread, 10.0**power * seen.spread / typical

    @cache
    def loss(at: tuple[float, float]) -> float:
        value = seen.loss(*point(*at))
        return value if math.isfinite(value) else math.inf

    best = min(((f, g) for f in (0.25, 0.5, 0.75, 1.0, 1.25) for g in (-4.0, -3.0, -2.0, -1.0, 0.0)), key=loss)
    step = (0.125, 0.5)
    for _ in range(STEPS):
        around = [(best[0] + i * step[0], best[1] + j * step[1]) for i, j in ((1, 0), (-1, 0), (0, 1), (0, -1))]
        before, best = best, min([best, *around], key=loss)
        if best == before:
            step = (step[0] / 2, step[1] / 2)
        if step[0] < LEAST_STEP:
            break
    return point(*best)
