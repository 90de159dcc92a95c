"""Word frequency: class weights in the loss (seed S4 3.4.3), and the mean threshold per frequency band (S0 5.1)."""

import numpy as np
import torch
from torch import Tensor

from cqwen_dist.config.errors import UserError
from cqwen_dist.config.training import LossConfig
from cqwen_dist.parallel.collectives import sum_over
from cqwen_dist.parallel.groups import Groups

# Bands of words by count rank: the first 100, the next 900, ...; the last band has words that never occur.
BANDS = (100, 1_000, 10_000)
LIMIT = 10.0  # of the weights of words
BAND_NAMES = ("1_100", "101_1000", "1001_10000", "10001_up", "unseen")  # suffixes of metric names


def class_weights(loss: LossConfig, counts: np.ndarray, start: int, rows: int, vocab_size: int) -> Tensor | None:
    """w_k [rows] of the words [start, start+rows), on the CPU; None if all are 1. Raises `UserError`.

    counts [V]: occurrences. "frequency" gives count^-0.5, scaled to a mean of 1 over occurrences and clipped to
    [1/LIMIT, LIMIT]. Words that never occur have weight 1, as they are negatives only.
    """
    if loss.class_weights is None:
        return None
    weights = np.ones(vocab_size)
    if loss.class_weights == "frequency":
        seen = counts > 0
        occurring = counts[seen].astype(np.float64)
        raw = occurring**-0.5
        raw *= occurring.sum() / (occurring * raw).sum()
        weights[seen] = raw.clip(1.0 / LIMIT, LIMIT)
    else:
        for word, weight in loss.class_weights.items():
            if word >= vocab_size:
                raise UserError(f"loss.class_weights.{word}", weight, f"word ids below {vocab_size}")
            weights[word] = weight
    return torch.from_numpy(weights[start : start + rows]).float()


def band_of(counts: np.ndarray) -> np.ndarray:
    """Band of each word [V] int64, an index into `BAND_NAMES`."""
    rank = np.empty(len(counts), dtype=np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    band = np.searchsorted(BANDS, rank, side="right")
    band[counts == 0] = len(BANDS) + 1
    return band


@torch.no_grad()
def mean_thresholds(threshold: Tensor, band: Tensor, groups: Groups) -> dict[str, float]:
    """dist/C_words_*: mean threshold of each non-empty band; {} for a scalar threshold.

    A learnable C should fall for frequent words and rise for rare words (S0 5.1). threshold [rows] and band [rows]
    (`band_of`): this rank's rows. Collective over the vocabulary group.
    """
    if threshold.ndim == 0:  # of a `WordHead`
        return {}
    sums = torch.zeros(2, len(BAND_NAMES), dtype=torch.float64, device=threshold.device)
    sums[0].index_add_(0, band, threshold.double())
    sums[1].index_add_(0, band, torch.ones_like(threshold, dtype=torch.float64))
    total, words = sum_over(sums, groups.vocab).tolist()
    return {f"dist/C_words_{name}": t / n for name, t, n in zip(BAND_NAMES, total, words, strict=True) if n}
