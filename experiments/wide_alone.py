"""The wide part without a base: fitted to training rows of a table, it predicts test rows, with intervals' widths."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cqwen_dist.batch import Batch, pad_rows
from cqwen_dist.data.tokenizer import Encoded, NumericalAwareTokenizer
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.tables.wide.wide_part import WidePart
from cqwen_dist.tables.wide.wide_rows import TextBefore, texts_before
from cqwen_dist.tables.wide.wide_start import fit_wide
from cqwen_dist.training.evaluation.number_metrics import interval_factors

READ = 64  # rows at a time


class WideAlone(NamedTuple):
    """Out-of-fold g and h for n training rows, and g and h for m test rows.

    All are 0, without folds, if the median predicts as well.
    """

    left_out: np.ndarray  # [2,n]
    asked: np.ndarray  # [2,m]
    folds: np.ndarray  # [n]


def fit_alone(
    tokenizer: NumericalAwareTokenizer,
    tokens: Sequence[Encoded],
    y: np.ndarray,
    learnt: np.ndarray,
    asked: np.ndarray,
    columns: int,
    random_features: int,
) -> WideAlone:
    """tokens, y [N]: prompts and targets. learnt [n], asked [m]: training and test rows. columns: per table."""
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


def half_widths(known: np.ndarray, scores: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Half-widths [m] of 90 % intervals, in scales, by predicted size, as the product has them.

    known, scores [n]: out-of-fold predictions and their errors in scales. asked [m]: predictions.
    """
    learnt, y = (Cauchy(torch.from_numpy(loc), torch.ones(len(loc))) for loc in (known, asked))
    return interval_factors(scores, learnt, (0.9,)).half_width(0.9, y).numpy()


def _batches(tokens: Sequence[Encoded], rows: np.ndarray, pad: int) -> Iterator[tuple[Batch, Tensor]]:
    """Batches of prompts, with the last position of each prompt in the flattened batch."""
    for some in np.array_split(rows, -(-len(rows) // READ)):
        ids, values, mask = pad_rows([tokens[row] for row in some], pad, on_left=False)
        nothing, positions = torch.zeros_like(values), torch.arange(ids.shape[1]).expand_as(ids)
        at = torch.arange(len(ids)) * ids.shape[1] + mask.sum(1) - 1
        yield Batch(ids, values, mask, positions, ids, nothing, nothing.bool()), at
