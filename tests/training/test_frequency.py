"""Weights of words by how often they occur, and the thresholds of frequent and rare ones."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from support.runs import metrics

from cqwen_dist.config import LossConfig, UserError
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.parallel.vocab_parallel import vocab_range
from cqwen_dist.training.frequency import BANDS, band_of, class_weights, mean_thresholds

COUNTS = np.array([0, 1, 4, 16, 64, 0, 1])


def test_class_weights_fall_with_the_count_and_average_one() -> None:
    weights = class_weights(LossConfig(class_weights="frequency"), COUNTS, 0, 7, 7)
    assert weights is not None
    ratios = weights[[1, 2, 3, 4, 6]] / weights[4]
    assert ratios.tolist() == pytest.approx([8, 4, 2, 1, 8])
    assert float((weights * torch.from_numpy(COUNTS)).sum() / COUNTS.sum()) == pytest.approx(1.0)
    assert weights[[0, 5]].tolist() == [1, 1], "words that never occur are only ever negatives"


def test_class_weights_are_limited() -> None:
    weights = class_weights(LossConfig(class_weights="frequency"), np.array([1, 10**6, 10**9]), 0, 3, 3)
    assert weights is not None
    assert float(weights.max()) == 10.0
    assert float(weights.min()) >= 0.1


def test_a_rank_gets_its_rows_weights_and_named_words_override() -> None:
    loss = LossConfig(class_weights={2: 3.0, 5: 0.0})
    whole, part = class_weights(loss, COUNTS, 0, 7, 7), class_weights(loss, COUNTS, 4, 3, 7)
    assert whole is not None
    assert part is not None
    assert whole.tolist() == [1, 1, 3, 1, 1, 0, 1]
    assert part.tolist() == whole[4:].tolist()
    assert class_weights(LossConfig(), COUNTS, 0, 7, 7) is None
    with pytest.raises(UserError, match=r"loss\.class_weights\.7"):
        class_weights(LossConfig(class_weights={7: 1.0}), COUNTS, 0, 7, 7)


def banded(size: int) -> dict[str, float]:
    """Bands of 12,345 words whose threshold is their rank, spread over a vocabulary group."""
    counts = np.random.RandomState(0).permutation(12_345)
    groups = build_groups(size)
    start, stop = vocab_range(len(counts), groups.vocab_rank, size)
    ranks = torch.from_numpy(len(counts) - 1 - counts).float()  # the most frequent word has rank 0
    return mean_thresholds(ranks[start:stop], torch.from_numpy(band_of(counts)[start:stop]), groups)


def test_frequency_bands_do_not_depend_on_the_ranks() -> None:
    alone, spread = run_ranks(banded, 1, 1)[0], run_ranks(banded, 2, 2)
    edges = (0, *BANDS, 12_344)
    expected = [(low + high - 1) / 2 for low, high in pairwise(edges)]
    names = ["1_100", "101_1000", "1001_10000", "10001_up"]
    assert [alone[f"dist/C_words_{name}"] for name in names] == pytest.approx(expected)
    assert alone["dist/C_words_unseen"] == 12_344, "one word has count 0"
    assert spread[0] == pytest.approx(alone)
    assert spread[1] == pytest.approx(alone)


def test_a_run_logs_frequency_bands_with_its_evaluations(two_ranks: Path) -> None:
    evaluated = [record for record in metrics(two_ranks) if "eval/accuracy" in record]
    assert evaluated
    assert all("dist/C_words_1_100" in record and "dist/C_words_unseen" in record for record in evaluated)
