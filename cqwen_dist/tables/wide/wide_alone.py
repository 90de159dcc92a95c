"""The wide part without a base: fitted to some rows of a table, it predicts the others, with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cqwen_dist.batch import Batch, pad_rows
from cqwen_dist.data.learnt_range import REACH
from cqwen_dist.data.tokenizer import Encoded, NumericalAwareTokenizer
from cqwen_dist.tables.baselines import Rival, TargetUnit
from cqwen_dist.tables.judging import WIDE_ALONE
from cqwen_dist.tables.wide.wide_part import WidePart
from cqwen_dist.tables.wide.wide_rows import TextBefore, texts_before
from cqwen_dist.tables.wide.wide_start import SEARCHED, fit_wide
from cqwen_dist.training.evaluation.number_metrics import interval_factors

FITTED_TO = "squared error, outliers limited"
READ = 64  # rows at a time
NEAREST, LEAST_NEAR = 1 / 3, 60  # share and number of rows whose errors set an interval's width
MOST = 8192  # rows to learn from: the time grows with their cube, the memory with their square


class WideAlone(NamedTuple):
    """g and h of the n rows learnt from, each by the fit without its fold, and of m others.

    All are 0, and there are no folds, where the median predicts as well.
    """

    left_out: np.ndarray  # [2,n]
    asked: np.ndarray  # [2,m]
    folds: np.ndarray  # [n]


def seconds_alone(rows: int) -> float:
    """About how long it takes on one core of a CPU, with that many rows to learn from."""
    return 0.0 if rows > MOST else 2.5e-5 * min(rows, SEARCHED) ** 2 + 2e-10 * rows**3


def fit_alone(
    tokenizer: NumericalAwareTokenizer,
    tokens: Sequence[Encoded],
    y: np.ndarray,
    learnt: np.ndarray,
    asked: np.ndarray,
    columns: int,
    random_features: int,
) -> WideAlone:
    """tokens, y [N]: of all rows, the prompts and the targets. learnt [n], asked [m]: rows. columns: of each table."""
    words = 1 + max(tokenizer.num_token_id, *tokenizer.tokenizer.get_vocab().values())
    part = WidePart(columns, tokenizer.num_token_id, words, random_features).eval()
    part.begin(tokenizer.line_end_ids)
    texts: list[TextBefore] = []
    for batch, at in _batches(tokens, learnt, tokenizer.pad_token_id):
        texts += texts_before(part, batch, at)
    fit = fit_wide(texts, torch.from_numpy(y[learnt]), columns, random_features)
    if fit is None:
        return WideAlone(np.zeros((2, len(learnt))), np.zeros((2, len(asked))), np.zeros(0, np.int64))
    for name, table in fit.tables.items():
        part.get_parameter(name).data.copy_(table)
    found = []
    for batch, at in _batches(tokens, asked, tokenizer.pad_token_id):
        of = batch.input_ids, batch.numeric_values, batch.position_ids, batch.attention_mask
        found.append(part(*of, keep=at)[0].double().numpy())
    left_out = np.stack([fit.left_out.numpy(), fit.spread.numpy()])
    return WideAlone(left_out, np.concatenate(found, 1), np.array(fit.folds))


def wide_alone(
    tokenizer: NumericalAwareTokenizer,
    prompts: Sequence[str],
    values: np.ndarray,
    learnt: np.ndarray,
    test: np.ndarray,
    by_log: bool,
    columns: int,
    random_features: int,
) -> Rival:
    """Its predictions for the test rows, and 90 % intervals as wide as the errors of rows left out demand."""
    unit = TargetUnit.of(values[learnt], by_log)
    y = unit.forward(values)
    found = fit_alone(tokenizer, tokenizer.encode_batch(prompts), y, learnt, test, columns, random_features)
    (left_out, h), (g, h_test) = found.left_out, found.asked
    middle = np.median(y[learnt] - left_out)
    scores = np.abs(y[learnt] - middle - left_out) / np.exp(h)
    half = half_widths(left_out, scores, g) * np.exp(h_test)
    ends = [unit.back(middle + g + side * half, REACH) for side in (-1, 1)]
    return Rival(WIDE_ALONE, unit.back(middle + g), FITTED_TO, np.stack(ends, 1))


def half_widths(known: np.ndarray, scores: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Half-widths [m] of 90 % intervals, in scales: by the scores nearest in predicted size, since errors grow with it.

    known, scores [n]: predictions of the rows left out, and their errors in scales. asked [m]: predictions.
    """
    order = np.argsort(known, kind="stable")
    count = min(max(round(NEAREST * len(known)), LEAST_NEAR), len(known))
    first = np.clip(np.searchsorted(known[order], asked) - count // 2, 0, len(known) - count)
    near = {start: interval_factors(scores[order[start : start + count]], (0.9,)) for start in set(first.tolist())}
    return np.array([near[start].half_width(0.9) for start in first.tolist()])


def _batches(tokens: Sequence[Encoded], rows: np.ndarray, pad: int) -> Iterator[tuple[Batch, Tensor]]:
    """Batches of prompts, and each one's last position in the flattened batch."""
    for some in np.array_split(rows, -(-len(rows) // READ)):
        ids, values, mask = pad_rows([tokens[row] for row in some], pad, on_left=False)
        nothing, positions = torch.zeros_like(values), torch.arange(ids.shape[1]).expand_as(ids)
        at = torch.arange(len(ids)) * ids.shape[1] + mask.sum(1) - 1
        yield Batch(ids, values, mask, positions, ids, nothing, nothing.bool()), at
