"""How often words occur: weights of the word loss by it (seed S4 3.4.3), and thresholds beside it (S0 5.1)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from cqwen_dist.config import LossConfig, UserError
from cqwen_dist.parallel.collectives import sum_over
from cqwen_dist.parallel.groups import Groups

# Words by the rank of their count: the first so many, the next, ...
BANDS = (100, 1_000, 10_000)


def class_weights(loss: LossConfig, counts: np.ndarray, start: int, rows: int, vocab_size: int) -> Tensor | None:
    """[rows] w_k of the words [start, start+rows), on the CPU; None where all weigh 1. Raises `UserError`.

    counts [V]: occurrences. By frequency: count^-power, scaled so that the mean over occurrences is 1, then kept
    within [1/limit, limit]; words that never occur weigh 1, they are only ever negatives.
    """
    if loss.class_weights is None:
        return None
    weights = torch.ones(vocab_size)
    if loss.class_weights == "frequency":
        seen = counts > 0
        occurring = counts[seen].astype(np.float64)
        raw = occurring**-loss.class_weight_power
        raw *= occurring.sum() / (occurring * raw).sum()
        limit = loss.class_weight_limit
        weights[torch.from_numpy(seen)] = torch.from_numpy(raw.clip(1.0 / limit, limit)).float()
    else:
        for word, weight in loss.class_weights.items():
            if word >= vocab_size:
                raise UserError(f"loss.class_weights.{word}", weight, f"word ids below {vocab_size}")
            weights[word] = weight
    return weights[start : start + rows]


def band_of(counts: np.ndarray) -> np.ndarray:
    """[V] int64: the band of each word, an index into `band_names`."""
    rank = np.empty(len(counts), dtype=np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    band = np.searchsorted(BANDS, rank, side="right")
    band[counts == 0] = len(BANDS) + 1
    return band


def band_names() -> list[str]:
    """As they end the names of metrics, the most frequent first."""
    return [*(f"{low + 1}_{high}" for low, high in pairwise((0, *BANDS))), f"{BANDS[-1] + 1}_up", "unseen"]


class ThresholdBands:
    """The mean threshold of frequent, rarer, rare and unseen words: a learnable C is expected to fall for the first
    and to rise for the last (S0 5.1)."""

    def __init__(self, counts: np.ndarray, start: int, rows: int, groups: Groups) -> None:
        """counts [V]: occurrences; [start, start+rows): this rank's words."""
        self.groups = groups
        self._band = torch.from_numpy(band_of(counts)[start : start + rows])
        self.names = [f"dist/C_words_{name}" for name in band_names()]

    @torch.no_grad()
    def __call__(self, threshold: Tensor) -> dict[str, float]:
        """threshold [rows] of this rank -> the mean of each band that has words; nothing of a scalar. Collective over
        the vocabulary group."""
        if threshold.ndim == 0:
            return {}
        self._band = self._band.to(threshold.device)
        sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=threshold.device)
        sums[0].index_add_(0, self._band, threshold.double())
        sums[1].index_add_(0, self._band, torch.ones_like(threshold, dtype=torch.float64))
        total, words = sum_over(sums, self.groups.vocab).tolist()
        return {name: t / n for name, t, n in zip(self.names, total, words, strict=True) if n}
